"""Values of rewards, and checks of what a reward returned. Grader processes import nothing else of the rewards."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

RewardValue = float | dict[str, float | None] | None
"""A number, several named parts, or None if the reward does not apply to the task."""


def validate_value(found: Any) -> RewardValue:
    """Return `found` as a RewardValue: a finite number (True is 1), a mapping of such, or None.

    Raises TypeError or ValueError.
    """
    if isinstance(found, Mapping):
        if not found:
            raise ValueError("returned an empty mapping; return None where the reward does not apply")
        return {_key(key): _number(value, f" for part `{key}`") for key, value in found.items()}
    return _number(found, "")


def validate_result(found: Any, in_groups: bool) -> RewardValue | list[RewardValue]:
    """Check what a user's function returned: a RewardValue, or a list of them from a group reward."""
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
