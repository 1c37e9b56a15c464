"""The orders that rollmill has: by epochs, and by success rates."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rollmill.config.orders.base import OrderSection, SuccessRateOrder


class ShuffledOrder(OrderSection):
    """Every task once per epoch, reshuffled in each epoch with the run's seed."""

    implementation = "rollmill.data.samplers.epochs:EpochSampler"
    name: Literal["shuffled"] = "shuffled"


class SequentialOrder(OrderSection):
    """Every task once per epoch, in the order of the taskset."""

    implementation = "rollmill.data.samplers.epochs:EpochSampler"
    name: Literal["sequential"] = "sequential"


class EasyToHardOrder(SuccessRateOrder):
    """Every task once per epoch, easy ones first; equally difficult ones are shuffled."""

    implementation = "rollmill.data.samplers.epochs:EasyToHardSampler"
    name: Literal["easy_to_hard"] = "easy_to_hard"
    by: Literal["difficulty", "success"] = "difficulty"
    """`difficulty`: numbers of a column. `success`: the tracked success rate at the start of the epoch."""
    column: str = "difficulty"
    """Column with the difficulty; greater is harder. Only with by `difficulty`."""

    @property
    def uses_success(self) -> bool:
        """See OrderSection.uses_success."""
        return self.by == "success" or self.skip_uniform > 0


class CurriculumOrder(SuccessRateOrder):
    """All tasks for some steps, then only hard ones (Kimi k1.5, arXiv:2501.12599, 2.3.4 and 3.5). If no task is hard,
    all are drawn."""

    implementation = "rollmill.data.samplers.batch_sampler:CurriculumSampler"
    name: Literal["curriculum"] = "curriculum"
    warmup: int = Field(20, ge=0)
    """Initial steps of the stage in which all tasks are drawn uniformly."""
    by: Literal["success", "difficulty"] = "success"
    """`success`: hard tasks have a low tracked success rate. `difficulty`: hard tasks have a high number in a
    column."""
    bound: float = 0.5
    """Tasks with a success rate of at most this, or a difficulty of at least this, are hard."""
    column: str = "difficulty"
    """Column with the difficulty. Only with by `difficulty`."""

    @property
    def uses_success(self) -> bool:
        """See OrderSection.uses_success."""
        return self.by == "success" or self.skip_uniform > 0


class PrioritisedOrder(SuccessRateOrder):
    """Sampling with probability proportional to 1 - success rate (Kimi k1.5, arXiv:2501.12599, 2.3.4)."""

    implementation = "rollmill.data.samplers.batch_sampler:PrioritisedSampler"
    name: Literal["prioritised"] = "prioritised"
    floor: float = Field(0.05, gt=0, le=1)
    """Minimum weight of a task, so that solved tasks are still visited now and then."""


class PosteriorOrder(SuccessRateOrder):
    """Thompson sampling: draws a success rate from each task's Beta posterior and picks the tasks nearest to the
    target."""

    implementation = "rollmill.data.samplers.batch_sampler:PosteriorSampler"
    name: Literal["posterior"] = "posterior"
    target: float = Field(0.5, ge=0, le=1)
    """Target success rate; rewards of 0 and 1 have the highest variance at 0.5."""
