"""What a reward is: something that judges a completion of a task and gives a verdict."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Protocol

from rollmill.core.types import Completion, Task

Value = float | dict[str, float | None] | None
"""A number, several named parts, or None where the reward does not apply to the task."""

OK, TIMEOUT, NOT_APPLICABLE = "ok", "timeout", "not_applicable"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one reward says of one completion. `outcome` is "ok" unless something else is worth counting."""

    value: Value
    outcome: str = OK


@dataclass(frozen=True, slots=True)
class Judgement:
    """What all rewards say of one completion.

    `reward` is the weighted sum of the parts that apply, None when none does. `parts` has an entry per reward, or
    name/part for a reward that gives several; `outcomes` has an entry per reward: ok, timeout, not_applicable, or a
    word of the reward's own. `seconds` is wall time, waiting for a free worker included.
    """

    reward: float | None
    parts: dict[str, float | None]
    outcomes: dict[str, str]
    seconds: float


class Reward(Protocol):
    """Judges one completion. What it raises ends the run as a RewardError."""

    async def judge(self, task: Task, completion: Completion) -> Verdict: ...


class GroupReward(Protocol):
    """Judges all completions of a task together: one verdict per completion, in their order."""

    async def judge_group(self, task: Task, completions: Sequence[Completion]) -> list[Verdict]: ...


def checked_value(found: Any) -> Value:
    """`found` as a Value: a finite number (True is 1), a mapping of such, or None. Raises TypeError or ValueError."""
    if isinstance(found, Mapping):
        if not found:
            raise ValueError("returned an empty mapping; return None where the reward does not apply")
        return {_key(key): _number(value, f" for part `{key}`") for key, value in found.items()}
    return _number(found, "")


def _key(key: Any) -> str:
    if not isinstance(key, str):
        raise TypeError(f"returned a part named {key!r}; part names must be strings")
    return key


def _number(found: Any, where: str) -> float | None:
    if found is None:
        return None
    if not isinstance(found, Real):
        kind = type(found).__name__
        raise TypeError(f"returned {found!r:.80} ({kind}){where}; expected a number, a mapping of numbers or None")
    if not math.isfinite(found):
        raise ValueError(f"returned {found}{where}; a reward must be a finite number")
    return float(found)


def tail_after(text: str, marker: str | None) -> str | None:
    """What follows the last `marker`; the whole text without a marker; None where the marker is missing."""
    if marker is None:
        return text
    _, found, tail = text.rpartition(marker)
    return tail if found else None
