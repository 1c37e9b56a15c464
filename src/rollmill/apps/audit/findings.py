"""Findings of an audit: one result per check."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

MAX_LISTED_TASKS = 5
"""Tasks that a finding lists."""


class Severity(StrEnum):
    """The severity of a finding."""

    OK = "ok"
    SKIPPED = "skipped"  #: could not be checked
    WARNING = "warning"  #: may be intended
    PROBLEM = "problem"  #: training would learn the wrong thing, or nothing


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check. `tasks` are the affected ones; `numbers` are the measurements behind it."""

    check: str
    severity: Severity
    text: str
    advice: str = ""
    tasks: list[str] = field(default_factory=list)
    numbers: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return it as plain JSON."""
        return asdict(self)


def passed_check(check: str, text: str, **numbers: Any) -> Finding:
    """Build the finding of a check that passed."""
    return Finding(check, Severity.OK, text, numbers=numbers)


def skipped_check(check: str, text: str) -> Finding:
    """Build the finding of a check that could not run."""
    return Finding(check, Severity.SKIPPED, text)


def finding_by_share(
    check: str, share: float, problem: float, text: str, advice: str, tasks: Sequence[str] = (), **numbers: Any
) -> Finding:
    """Build a finding from a share of the tasks: OK at 0, a problem from `problem` on, else a warning."""
    severity = Severity.PROBLEM if share >= problem else Severity.WARNING
    severity = Severity.OK if share == 0 else severity
    numbers = {"share": share, **numbers}
    return Finding(check, severity, text, advice if severity is not Severity.OK else "", list(tasks), numbers)


def list_task_ids(tasks: Sequence[str]) -> str:
    """List the first ids, and the number of further ones."""
    more = f" and {len(tasks) - MAX_LISTED_TASKS} more" if len(tasks) > MAX_LISTED_TASKS else ""
    return ", ".join(tasks[:MAX_LISTED_TASKS]) + more
