"""`judging`: how completions are judged, beside the rewards themselves."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from rollmill.config.section import Section


class RewardManagerConfig(Section):
    """How completions are judged, beside the rewards themselves."""

    workers: int = Field(1, ge=1)
    """Grader processes: they compare formulas and run generators' scorers. Each starts when it is needed."""
    deadline_s: float = Field(300.0, gt=0)
    """Longest wait for one reward of one completion, the wait for a free worker included. Past it the outcome is `late`
    and the reward its `timeout_reward`."""
    clip: tuple[float, float] | None = None
    """Bounds of the weighted sum."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.clip is not None and self.clip[0] > self.clip[1]:
            raise ValueError(f"clip: the lower bound {self.clip[0]:g} is above the upper {self.clip[1]:g}")
        return self
