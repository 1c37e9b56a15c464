"""Parses the verdict at the end of a judge's reply strictly: the last JSON object, its key and its range."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from statistics import fmean, median
from typing import Any, Literal

_LONGEST, _MOST_OBJECTS = 65_536, 400
_OBJECT = re.compile(r'\{(?=\s*+["}])')
_THOUGHT_ENDS = "</think>"


def last_json_object(text: str) -> dict[str, Any] | None:
    """Return the last outermost JSON object of a reply; empty if it has a duplicate key, None without one.

    Thoughts before </think> are ignored. Of a long reply only the end is read.
    """
    text = text.rpartition(_THOUGHT_ENDS)[2][-_LONGEST:]
    starts = [match.start() for match in _OBJECT.finditer(text)]  # not the braces of formulas
    if len(starts) > _MOST_OBJECTS:
        return None
    found: dict[str, Any] | None = None
    end = 0
    for start in starts:
        if start >= end:
            with suppress(json.JSONDecodeError, RecursionError):
                found, end = _DECODER.raw_decode(text, start)
    return found


def parse_score(text: str, key: str, scale: tuple[float, float]) -> float | None:
    """Return the score of a reply, from 0 to 1; None if it has none, or one outside of the scale."""
    value = (last_json_object(text) or {}).get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    low, high = scale
    return (value - low) / (high - low) if low <= value <= high else None


def parse_winner(text: str, key: str) -> float | None:
    """Return 1 if the reply prefers A, 0 for B, 0.5 for a tie; None for anything else."""
    value = (last_json_object(text) or {}).get(key)
    return {"A": 1.0, "B": 0.0, "tie": 0.5}.get(value) if isinstance(value, str) else None


def parse_ranking(text: str, key: str, count: int) -> list[int] | None:
    """Return positions (from 0) of all candidates, best first. None if one is missing, duplicate or unknown."""
    value = (last_json_object(text) or {}).get(key)
    if not isinstance(value, list) or any(type(each) is not int for each in value):
        return None
    return [each - 1 for each in value] if sorted(value) == list(range(1, count + 1)) else None


def combine_votes(scores: Sequence[float], how: Literal["mean", "median", "majority"]) -> float:
    """Combine several votes into one number."""
    if how == "mean":
        return fmean(scores)
    if how == "median":
        return float(median(scores))
    counts = Counter(scores)
    most = max(counts.values())
    return fmean(score for score, count in counts.items() if count == most)


def verdict_schema(key: str, verdict: dict[str, Any]) -> dict[str, Any]:
    """Return a JSON schema of thoughts, then the verdict."""
    return {
        "type": "object",
        "properties": {"thoughts": {"type": "string"}, key: verdict},
        "required": ["thoughts", key],
        "additionalProperties": False,
    }


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    return found if len(found) == len(pairs) else {}


def _integer(digits: str) -> int | float:
    return int(digits) if len(digits) < 20 else float(digits)


_DECODER = json.JSONDecoder(object_pairs_hook=_once, parse_int=_integer)
