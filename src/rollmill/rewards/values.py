"""Values of rewards, and checks of what a reward returned. Grader processes import nothing else of the rewards."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

RewardValue = float | dict[str, float | None] | None
"""A number, several named parts, or None if the reward does not apply to the task."""


@dataclass(frozen=True, slots=True)
class LoggedScore:
    """A value with numbers that are logged, but do not count."""

    value: Any
    details: dict[str, float] = field(default_factory=dict)


def validate_value(found: Any) -> RewardValue:
    """Return `found` as a RewardValue: a finite number (True is 1), a mapping of such, or None.

    Raises TypeError or ValueError.
    """
    if isinstance(found, Mapping):
        if not found:
            raise ValueError("returned an empty mapping; return None where the reward does not apply")
        return {_key(key): _number(value, f" for part `{key}`") for key, value in found.items()}
    return _number(found, "")


def validate_result(found: Any, in_groups: bool) -> tuple[list[RewardValue], list[dict[str, float]]]:
    """Check what a user's function returned: a RewardValue, or a list of them from a group reward. A LoggedScore stands
    for its value. Return the values, and of each the numbers that are only logged."""
    if not in_groups:
        found = [found]
    elif isinstance(found, str | bytes | dict) or not hasattr(found, "__iter__"):
        raise TypeError(f"returned {found!r:.80}; a group reward returns a list with one value per completion")
    scores = [each if isinstance(each, LoggedScore) else LoggedScore(each) for each in found]
    details = [{key: value for key, value in each.details.items() if math.isfinite(value)} for each in scores]
    return [validate_value(each.value) for each in scores], details


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
