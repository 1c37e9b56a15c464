"""What all rewards have in common: their weight, their bounds, and what they close."""

from __future__ import annotations

from typing import Any, Literal, Self

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


# `judging`: how completions are judged, beside the rewards themselves.


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


# `rewards`: users' functions.


class PythonReward(RewardSection):
    """A user's function `(task, completion) -> float | dict | None`, plain or async."""

    name: Literal["python"]
    function: str
    """`FILE.py:NAME`, `package.module:NAME`, or the name of a reward that a plugin registers."""
    options: dict[str, Any] = {}
    """Keyword arguments passed on."""
    time_limit_s: float = Field(60.0, gt=0)
    """Longest wait for one judgement; past it the outcome is `timeout`."""
    run_in: Literal["process", "thread"] = "process"
    """Where a plain function runs. Processes leave the rollouts alone and can be ended; each has its own copy of the
    file's global variables. An async function runs in an event loop of this process."""
    processes: int = Field(4, ge=1)
    """Most processes of this function at once; each starts when it is needed."""
