"""`changes`: what a run changes about itself after a step, planned in its file or recorded by an earlier run."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from rollmill.config.section import Section


class ChangeConfig(Section):
    """A change after a training step. The lines of an earlier run's `changes.jsonl` are such sections."""

    step: int = Field(ge=1)
    """Training step of the whole run after which the change is made. It concerns the stage of that step."""
    lr: float | None = Field(None, gt=0)
    """New peak learning rate, `trainer.lr`; its schedule goes on."""
    rewards: dict[str, float] = {}
    """New weights of rewards, by their name in the metrics. They hold for completions of weights from this step on,
    with a max_staleness above 0 of the step after it."""
    stop: bool = False
    """End the stage."""

    @model_validator(mode="after")
    def _some_change(self) -> Self:
        if self.lr is None and not self.rewards and not self.stop:
            raise ValueError("give lr, rewards or stop")
        return self
