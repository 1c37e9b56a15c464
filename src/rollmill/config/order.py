"""`taskset.order`: which task comes next."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, SerializeAsAny, WrapValidator

from rollmill.config.section import NamedSection, RegisteredUnion


class OrderSection(NamedSection):
    """What all orders have in common."""

    skip_uniform: int = Field(0, ge=0)
    """A task whose last group was equally successful throughout (all right or all wrong) is left out for the next N
    epochs; where epochs do not exist, N times as many draws as there are tasks. 0: never."""

    @property
    def uses_success(self) -> bool:
        """Whether what happened to earlier tasks decides."""
        return self.skip_uniform > 0


class ShuffledOrder(OrderSection):
    """Every task once per epoch, shuffled with the run's seed, differently in each epoch."""

    name: Literal["shuffled"] = "shuffled"


class SequentialOrder(OrderSection):
    """Every task once per epoch, as they stand in the taskset."""

    name: Literal["sequential"] = "sequential"


class SuccessRateOrder(OrderSection):
    """Keys of orders that keep each task's success rate: prior and completions so far, the newest weighing most."""

    prior: float = Field(0.5, gt=0, lt=1)
    """Success rate of a task that was never rolled out."""
    prior_column: str | None = None
    """Column with a prior of each task's own from 0 to 1, such as `success_rate` of `rollmill tasks score`."""
    prior_weight: float = Field(2.0, gt=0)
    """How many completions the prior is worth."""
    discount: float = Field(0.7, gt=0, le=1)
    """Factor of what was seen before, each time the task is rolled out again; 1 never forgets."""

    @property
    def uses_success(self) -> bool:
        """See `OrderSection`."""
        return True


class EasyToHardOrder(SuccessRateOrder):
    """Every task once per epoch, the easy ones first; equally hard ones shuffled."""

    name: Literal["easy_to_hard"] = "easy_to_hard"
    by: Literal["difficulty", "success"] = "difficulty"
    """`difficulty`: numbers of a column. `success`: the tracked success rate when the epoch begins."""
    column: str = "difficulty"
    """Column with the difficulty; greater is harder. Only with by `difficulty`."""

    @property
    def uses_success(self) -> bool:
        """See `OrderSection`."""
        return self.by == "success" or self.skip_uniform > 0


class CurriculumOrder(SuccessRateOrder):
    """All tasks for some steps, then only hard ones (Kimi k1.5, arXiv:2501.12599, 2.3.4 and 3.5). While no task is
    hard, all are drawn."""

    name: Literal["curriculum"] = "curriculum"
    warmup: int = Field(20, ge=0)
    """Steps of the stage in which every task is drawn equally often."""
    by: Literal["success", "difficulty"] = "success"
    """`success`: hard is what has a low tracked success rate. `difficulty`: hard is what a column says."""
    bound: float = 0.5
    """Hard is a success rate of at most this, or a difficulty of at least this."""
    column: str = "difficulty"
    """Column with the difficulty. Only with by `difficulty`."""

    @property
    def uses_success(self) -> bool:
        """See `OrderSection`."""
        return self.by == "success" or self.skip_uniform > 0


class PrioritisedOrder(SuccessRateOrder):
    """With chances in proportion to 1 - success rate (Kimi k1.5, arXiv:2501.12599, 2.3.4)."""

    name: Literal["prioritised"] = "prioritised"
    floor: float = Field(0.05, gt=0, le=1)
    """Least weight of a task: one that is always solved is visited now and then."""


class PosteriorOrder(SuccessRateOrder):
    """Thompson sampling: a success rate is drawn from each task's Beta posterior, and the tasks nearest to the target
    come."""

    name: Literal["posterior"] = "posterior"
    target: float = Field(0.5, ge=0, le=1)
    """The success rate that teaches most; rewards of 0 and 1 vary most at 0.5."""


class CustomOrder(SuccessRateOrder):
    """An order registered by `@rollmill.order`; its other keys are the function's options."""


OrderUnion = ShuffledOrder | SequentialOrder | EasyToHardOrder | CurriculumOrder | PrioritisedOrder | PosteriorOrder

OrderConfig = Annotated[
    SerializeAsAny[Annotated[OrderUnion, Field(discriminator="name")]], WrapValidator(RegisteredUnion("order"))
]
