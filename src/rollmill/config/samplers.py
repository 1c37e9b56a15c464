"""`taskset.order`: the order in which tasks are rolled out, by epochs or by success rates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from rollmill.config.section import NamedSection, module_sections, section_union


class SamplerSection(NamedSection):
    """Base of task orders."""

    skip_uniform: int = Field(0, ge=0)
    """Skip a task for the next N epochs after a group that was all right or all wrong; for orders without epochs, for N
    times as many draws as there are tasks. 0: never."""

    @property
    def uses_success(self) -> bool:
        """True if the order depends on earlier results."""
        return self.skip_uniform > 0


class SuccessRateSamplerSection(SamplerSection):
    """Base of orders that track each task's success rate: a prior, updated by its completions, the newest weighing
    most."""

    prior: float = Field(0.5, gt=0, lt=1)
    """Success rate of a task that has not been rolled out."""
    prior_column: str | None = None
    """Column with a prior per task from 0 to 1, such as `success_rate` of `rollmill tasks score`."""
    prior_weight: float = Field(2.0, gt=0)
    """Weight of the prior, in completions."""
    discount: float = Field(0.7, gt=0, le=1)
    """Discount of earlier results each time the task is rolled out again; 1: no discount."""

    @property
    def uses_success(self) -> bool:
        return True


class DifficultySamplerSection(SuccessRateSamplerSection):
    """Base of orders by the difficulty of a column, or by tracked success rates."""

    if TYPE_CHECKING:
        by: Literal["difficulty", "success"]

    @property
    def uses_success(self) -> bool:
        return self.by == "success" or self.skip_uniform > 0

    def unused_keys(self) -> dict[str, str]:
        if self.by == "success":
            return {"column": "not honoured with by `success`; it is with `difficulty`"}
        tracking = SuccessRateSamplerSection.model_fields.keys() - {"name", "skip_uniform"}
        return dict.fromkeys(tracking, "not honoured with by `difficulty`; it is with `success`")


class CustomSamplerSection(SuccessRateSamplerSection):
    """An order registered by `@rollmill.order`; its other keys are the function's options."""


class ShuffledSamplerSection(SamplerSection):
    """Every task once per epoch, reshuffled in each epoch with the run's seed."""

    implementation = "rollmill.data.samplers.epochs:EpochSampler"
    name: Literal["shuffled"] = "shuffled"


class SequentialSamplerSection(SamplerSection):
    """Every task once per epoch, in the order of the taskset."""

    implementation = "rollmill.data.samplers.epochs:EpochSampler"
    name: Literal["sequential"] = "sequential"


class EasyToHardSamplerSection(DifficultySamplerSection):
    """Every task once per epoch, easy ones first; equally difficult ones are shuffled."""

    implementation = "rollmill.data.samplers.epochs:EasyToHardSampler"
    name: Literal["easy_to_hard"] = "easy_to_hard"
    by: Literal["difficulty", "success"] = "difficulty"
    """`difficulty`: numbers of a column. `success`: the tracked success rate at the start of the epoch."""
    column: str = "difficulty"
    """Column with the difficulty; greater is harder. Only with by `difficulty`."""


class CurriculumSamplerSection(DifficultySamplerSection):
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


class PrioritisedSamplerSection(SuccessRateSamplerSection):
    """Sampling with probability proportional to 1 - success rate (Kimi k1.5, arXiv:2501.12599, 2.3.4)."""

    implementation = "rollmill.data.samplers.batch_sampler:PrioritisedSampler"
    name: Literal["prioritised"] = "prioritised"
    floor: float = Field(0.05, gt=0, le=1)
    """Minimum weight of a task, so that solved tasks are still visited now and then."""


class PosteriorSamplerSection(SuccessRateSamplerSection):
    """Thompson sampling: draws a success rate from each task's Beta posterior and picks the tasks nearest to the
    target."""

    implementation = "rollmill.data.samplers.batch_sampler:PosteriorSampler"
    name: Literal["posterior"] = "posterior"
    target: float = Field(0.5, ge=0, le=1)
    """Target success rate; rewards of 0 and 1 have the highest variance at 0.5."""


if TYPE_CHECKING:
    SamplerConfig = SamplerSection
else:
    SamplerConfig = section_union(module_sections(__name__, SamplerSection), kind="order")
