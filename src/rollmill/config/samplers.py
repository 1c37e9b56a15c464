"""Base classes of `taskset.sampler`, which chooses the tasks to roll out, by epochs or by success rates. The samplers
themselves stand in `rollmill.data.samplers`."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from rollmill.config.section import NamedSection

if TYPE_CHECKING:
    from rollmill.data.taskset import Taskset


class SamplerSection(NamedSection):
    """Base of samplers. A stage works with a copy of the section, which is a `rollmill.data.Sampler`, too."""

    sees_sequence: ClassVar[bool] = False  #: depends on the sequence of the taskset

    skip_uniform: int = Field(0, ge=0)
    """Skip a task for the next N epochs after a group that was all right or all wrong; for samplers without epochs, for
    N times as many draws as there are tasks. 0: never."""

    @property
    def uses_success(self) -> bool:
        """True if the choice depends on earlier results."""
        return self.skip_uniform > 0

    def setup(self, taskset: Taskset, seed: int, batch: int) -> None:
        """Begin with the tasks of a taskset, of which `batch` make a training step.

        Raises TasksetError if the sampler needs a column that tasks lack.
        """
        raise NotImplementedError


class SuccessRateSamplerSection(SamplerSection):
    """Base of samplers that track each task's success rate: a prior, updated by its completions, the newest weighing
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
    """Base of samplers by the difficulty of a column, or by tracked success rates."""

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
