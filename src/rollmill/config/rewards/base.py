"""Base class of rewards, gates, the reward manager's options, users' Python rewards, and names in a list of rewards."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from rollmill.config.section import Section


class GateConfig(Section):
    """Makes a reward a gate: completions that do not pass it earn a fixed reward, and no other reward is computed."""

    at_least: float
    """Minimum value to pass, within the reward's `clip` and before its weight; the sum if the reward gives several
    numbers. A task that the reward does not apply to passes."""
    otherwise: float = 0.0
    """The completion's whole reward if it does not pass. The lowest of several failed gates counts."""


class RewardSection(Section):
    """Keys of every reward."""

    if TYPE_CHECKING:
        name: str  # of every reward of a run file

    timeout_is_verdict: ClassVar[bool] = False
    """The outcome `timeout` judges the completion, as that of its own program does; else the verdict is missing."""
    decides: ClassVar[bool] = False
    """Says whether an answer is right. A task has one such reward, unless `judging.verdicts` is `several`."""
    largest: ClassVar[float | None] = None
    """Largest value, before clip and weight; None: not known."""
    weight: float = 1.0
    """Weight of this part in the sum. At 0 it is only logged."""
    clip: tuple[float, float] | None = None
    """Bounds of each of the reward's numbers, applied before the weight."""
    gate: GateConfig | None = None
    """Makes the reward a gate, computed before all others."""
    after_steps: int = Field(0, ge=0)
    """Number of training steps after which the reward counts (and its gate applies), by the policy that sampled the
    completion; before that, it is only logged."""
    role: str | None = None
    """Role whose replies the reward scores, one of `roles`. Default: it scores replies in all roles."""
    timeout_reward: float = 0.0
    """Reward of completions whose scoring times out (outcomes `timeout` and `late`)."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.clip is not None and self.clip[0] > self.clip[1]:
            raise ValueError(f"clip: the lower bound {self.clip[0]:g} is above the upper {self.clip[1]:g}")
        return self


def attainable_maximum(
    rewards: Sequence[RewardSection], settings: RewardManagerConfig, named: Collection[str] | None = None
) -> float | None:
    """Returns the largest sum that a completion can earn; None if it is not known.

    A reward with a negative weight counts as 0.

    Args:
        named: names of the rewards that a task's row asks for (`taskset.fields.rewards`); default: all.
    """
    total = 0.0
    for name, reward in zip(reward_part_names(rewards), rewards, strict=True):
        if reward.weight <= 0 or (named is not None and name not in named):
            continue
        largest = reward.largest
        if reward.clip is not None:
            largest = reward.clip[1] if largest is None else min(max(largest, reward.clip[0]), reward.clip[1])
        if largest is None:
            return None if settings.clip is None else settings.clip[1]
        total += reward.weight * largest
    return total if settings.clip is None else min(max(total, settings.clip[0]), settings.clip[1])


class RewardManagerConfig(Section):
    """Settings of the reward manager, shared by all rewards."""

    workers: int = Field(1, ge=1)
    """Number of grader processes, which compare formulas and run generators' scorers. Each starts on first use."""
    deadline_s: float = Field(300.0, gt=0)
    """Timeout of one reward of one completion, including waiting for a free worker. The outcome is then `late` and the
    reward its `timeout_reward`."""
    clip: tuple[float, float] | None = None
    """Bounds of the weighted sum."""
    verdicts: Literal["one", "several"] = "one"
    """`one`: two rewards of the list that both say whether an answer is right, such as math and k12, are refused where
    they apply to the same task, since its maximum would be 2. `several`: they add up."""
    missing_limit: float = Field(0.5, gt=0, le=1)
    """Largest share of a step's judgements of one reward that may end without a verdict: they took too long, or the
    reward's model gave none. Above it the run warns."""
    missing_steps: int = Field(3, ge=0)
    """Steps in a row above `missing_limit` that end the run with an error; 0: none."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.clip is not None and self.clip[0] > self.clip[1]:
            raise ValueError(f"clip: the lower bound {self.clip[0]:g} is above the upper {self.clip[1]:g}")
        return self


class PythonReward(RewardSection):
    """A user's function `(task, completion) -> float | dict | None`, plain or async; or one written for TRL or verl."""

    implementation = "rollmill.rewards.python:build_python_reward"
    name: Literal["python"]
    function: str
    """`FILE.py:NAME`, `package.module:NAME`, or the name of a reward registered by a plugin; `FILE.pkl:NAME` of a
    function that the Python interface has stored."""
    options: dict[str, Any] = {}
    """Keyword arguments of the function."""
    time_limit_s: float = Field(60.0, gt=0)
    """Timeout of one call; the outcome is then `timeout`."""
    run_in: Literal["auto", "process", "thread"] = "auto"
    """Isolation of a plain function. Processes do not slow down rollouts and can be killed; each has its own copy of
    the file's global variables. `auto`: in the run's own process as long as calls are quick (50 ms at most, 1 ms on
    average), then in processes. An async function runs in an event loop of this process."""
    processes: int = Field(4, ge=1)
    """Maximum number of processes for this function; each starts on first use."""

    @field_validator("function")
    @classmethod
    def _names_a_function(cls, value: str) -> str:
        if re.fullmatch(r".+\.(py|pkl):\w+|[\w.]+(:\w+)?", value) is None:
            text = "expected FILE.py:NAME, package.module:NAME or the name a plugin registers"
            raise ValueError(f"{text}, found `{value}`")
        return value


def reward_part_names(rewards: Sequence[RewardSection]) -> list[str]:
    """Returns one name per reward: its own or its Python function's; a second one of the same name is name#2."""
    seen: Counter[str] = Counter()
    names = []
    for reward in rewards:
        python = isinstance(reward, PythonReward)
        name = PurePath(reward.function).name.rpartition(":")[2] if python else reward.name  # type: ignore[attr-defined]
        seen[name] += 1
        names.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return names
