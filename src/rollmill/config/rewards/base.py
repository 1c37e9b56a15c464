"""What all rewards have in common: their weight, their bounds, and what they close."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from rollmill.config.section import Section


class GateConfig(Section):
    """A reward as a gate: where it is not passed, the completion earns a fixed reward and nothing else is judged."""

    at_least: float
    """What the reward has to reach, within its `clip` and before its weight; the sum where it gives several numbers. A
    task that the reward does not apply to passes."""
    otherwise: float = 0.0
    """The completion's whole reward where the gate is not passed. Of several, the lowest counts."""


class RewardSection(Section):
    """Keys of every reward."""

    weight: float = 1.0
    """Factor of this part in the sum. At 0 it is only logged."""
    clip: tuple[float, float] | None = None
    """Bounds of each of its numbers, put on before the weight."""
    gate: GateConfig | None = None
    """Makes the reward a gate, which is judged before all others."""
    after_steps: int = Field(0, ge=0)
    """Counts, and closes as a gate, only for completions of policies that have made this many training steps; before,
    it is only logged."""
    timeout_reward: float = 0.0
    """Reward where judging takes too long: the outcomes `timeout` and `late`."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.clip is not None and self.clip[0] > self.clip[1]:
            raise ValueError(f"clip: the lower bound {self.clip[0]:g} is above the upper {self.clip[1]:g}")
        return self
