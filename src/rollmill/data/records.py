"""What a source yields, one per row: the row, or why there is none."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

Row: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True)
class SourceRow:
    """One row of a source. `problem` says why `row` is empty, if it could not be read."""

    where: str  #: file:line, or the source and the row's number
    row: Row = field(default_factory=dict)
    problem: str | None = None
    metadata: dict[str, Any] | None = None  #: what the task remembers; default: the columns that play no part in it


class BadRowError(ValueError):
    """A row cannot become a task; the message says why."""


def make_record(where: str, value: Any) -> SourceRow:
    """The record of a value that should be a mapping with text keys."""
    if not isinstance(value, Mapping):
        return SourceRow(where, problem=f"expected an object, found {type(value).__name__}")
    strange = [key for key in value if not isinstance(key, str)]
    if strange:
        return SourceRow(where, problem=f"column names must be text, found {strange[0]!r}")
    return SourceRow(where, dict(value))


def to_finite_number(value: Any) -> float | None:
    """A finite number of a column, also one that is written as text (as CSV has it); None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        found = float(value)
    except (ValueError, OverflowError):
        return None
    return found if math.isfinite(found) else None


def check_finite(value: Any, what: str) -> None:
    """Raises BadRowError where a value is NaN or infinite, or holds such a number: nothing equals it."""
    parts = [value]
    while parts:
        part = parts.pop()
        if isinstance(part, Mapping):
            parts += part.values()
        elif isinstance(part, list | tuple):
            parts += part
        elif isinstance(part, numbers.Real) and not isinstance(part, numbers.Rational) and not math.isfinite(part):
            raise BadRowError(f"{what} holds {part}, which nothing equals; leave it out, or write text")


SourceRows: TypeAlias = Iterator[SourceRow]
