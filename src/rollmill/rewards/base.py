"""What a reward is: something that judges a completion of a task and gives a verdict."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Protocol, runtime_checkable

from rollmill.config.rewards import ChartReward, CountReward, K12Reward, MathReward, RewardConfig, VQAReward
from rollmill.errors import ConfigError
from rollmill.types import Completion, Task

RewardValue = float | dict[str, float | None] | None
"""A number, several named parts, or None where the reward does not apply to the task."""

OK, TIMEOUT, LATE, NOT_APPLICABLE, GATED = "ok", "timeout", "late", "not_applicable", "gated"
NO_ANSWER, HEDGED = "no_answer", "hedged"
"""Outcomes of a completion without an answer, and of one that offers several."""


@dataclass(frozen=True, slots=True)
class Score:
    """What one reward says of one completion. `outcome` is "ok" unless something else is worth counting.

    `queued` is how many seconds passed before a worker began, and `worked` how many it took then; None where nobody
    knows better than the judge. `details` are numbers that are logged and not counted, such as the reward once more
    under the subject of the task.
    """

    value: RewardValue
    outcome: str = OK
    queue_s: float = 0.0
    run_s: float | None = None
    details: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RewardTiming:
    """When one reward judged one completion: `time.perf_counter()` seconds. Until `started` it waited for a worker."""

    asked: float
    started: float
    ended: float


@dataclass(frozen=True, slots=True)
class RewardResult:
    """What all rewards say of one completion.

    `reward` is the weighted sum of the parts that apply, None when none does. `parts` has an entry per reward, or
    name/part for a reward that gives several; `outcomes` has an entry per reward: ok, timeout, late, not_applicable,
    gated, or a word of the reward's own. `seconds` is wall time, waiting for a free worker included; `spans` tells when
    each reward judged. `closed_by` names the gate that was not passed. `details` are the numbers that rewards
    log and do not count, as name/key.
    """

    reward: float | None
    parts: dict[str, float | None]
    outcomes: dict[str, str]
    seconds: float
    spans: dict[str, RewardTiming] = field(default_factory=dict)
    failed_gate: str | None = None
    details: dict[str, float] = field(default_factory=dict)


class Reward(Protocol):
    """Judges one completion. What it raises ends the run as a RewardError."""

    async def judge(self, task: Task, completion: Completion) -> Score: ...


class GroupReward(Protocol):
    """Judges all completions of a task together: one verdict per completion, in their order.

    `judged` is what the rewards that see one completion at a time said of each.
    """

    async def judge_group(
        self, task: Task, completions: Sequence[Completion], judged: Sequence[RewardResult]
    ) -> list[Score]: ...


@runtime_checkable
class SupportsCounters(Protocol):
    """A reward of either kind that also counts something, such as calls and their cost."""

    def counters(self) -> dict[str, float]:
        """Sums since the reward was made, by name."""
        ...


def validate_value(found: Any) -> RewardValue:
    """`found` as a Value: a finite number (True is 1), a mapping of such, or None. Raises TypeError or ValueError."""
    if isinstance(found, Mapping):
        if not found:
            raise ValueError("returned an empty mapping; return None where the reward does not apply")
        return {_key(key): _number(value, f" for part `{key}`") for key, value in found.items()}
    return _number(found, "")


def validate_result(found: Any, in_groups: bool) -> RewardValue | list[RewardValue]:
    """What a user's function returned: a Value, or a list of them from a function that sees groups."""
    if not in_groups:
        return validate_value(found)
    if isinstance(found, str | bytes | dict) or not hasattr(found, "__iter__"):
        raise TypeError(f"returned {found!r:.80}; a group reward returns a list with one value per completion")
    return [validate_value(value) for value in found]


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


def text_after(text: str, marker: str | None) -> str | None:
    """What follows the last `marker`; the whole text without a marker; None where the marker is missing."""
    if marker is None:
        return text
    _, found, tail = text.rpartition(marker)
    return tail if found else None


def last_tag_content(text: str, tag: str) -> str | None:
    """What stands inside the last `<tag>...</tag>`; None where the last one is not closed, or there is none."""
    start = text.rfind(f"<{tag}>")
    if start < 0:
        return None
    inside, closed, _ = text[start + len(tag) + 2 :].partition(f"</{tag}>")
    return inside if closed else None


# References that a reward could only fail on, found when the tasks are loaded.

_COMPARING = (MathReward, K12Reward, CountReward, ChartReward, VQAReward)
"""Rewards that compare with the reference; for others an empty text may be meant."""
_NAMED = 3


def require_references(rewards: Iterable[RewardConfig], tasks: Sequence[Task], where: str) -> None:
    """Raise ConfigError where a reward that compares with the reference has a task whose reference is empty.

    Args:
        tasks: the tasks that the rewards judge.
        where: the section that they come from, for the message.
    """
    comparing = [reward for reward in rewards if isinstance(reward, _COMPARING)]
    if not comparing:
        return
    empty = [task.id for task in tasks if _is_judged(comparing[0], task) and _is_empty(_reference(comparing[0], task))]
    if empty:
        named = ", ".join(f"`{task}`" for task in empty[:_NAMED]) + (", ..." if len(empty) > _NAMED else "")
        raise ConfigError(
            f"{where}: {len(empty)} of {len(tasks)} tasks have an empty answer ({named}), which the reward "
            f"`{comparing[0].name}` cannot compare with; give an answer, or null where the reward does not apply"
        )


def _is_judged(reward: RewardConfig, task: Task) -> bool:
    column = task.metadata.get("vision")
    is_visual = isinstance(reward, CountReward | ChartReward | VQAReward)
    return not (is_visual and isinstance(column, Mapping) and reward.name not in column)


def _reference(reward: RewardConfig, task: Task) -> Any:
    column = task.metadata.get("k12")
    own = column.get("answer") if isinstance(reward, K12Reward) and isinstance(column, Mapping) else None
    return task.answer if own is None else own


def _is_empty(answer: Any) -> bool:
    if isinstance(answer, str):
        return not answer.strip()
    if isinstance(answer, list | tuple):
        return not answer or any(isinstance(each, str) and not each.strip() for each in answer)
    return isinstance(answer, Mapping) and not answer
