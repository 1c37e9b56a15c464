"""What an audit finds: one verdict per check."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

MAX_LISTED_TASKS = 5
"""Tasks that are named."""


class Severity(StrEnum):
    """How bad a finding is."""

    OK = "ok"
    SKIPPED = "skipped"  #: could not be checked
    WARNING = "warning"  #: may be meant so
    PROBLEM = "problem"  #: training would learn something else, or nothing


@dataclass(frozen=True, slots=True)
class Finding:
    """The verdict of one check. `tasks` are those it is about, and `numbers` what it was concluded from."""

    check: str
    severity: Severity
    text: str
    advice: str = ""
    tasks: list[str] = field(default_factory=list)
    numbers: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """As plain JSON."""
        return asdict(self)


def passed_check(check: str, text: str, **numbers: Any) -> Finding:
    """Nothing is wrong."""
    return Finding(check, Severity.OK, text, numbers=numbers)


def skipped_check(check: str, text: str) -> Finding:
    """It could not be checked."""
    return Finding(check, Severity.SKIPPED, text)


def finding_by_share(
    check: str, share: float, problem: float, text: str, advice: str, tasks: Sequence[str] = (), **numbers: Any
) -> Finding:
    """A problem from a share of the tasks on, below it a warning; fine where the share is 0."""
    severity = Severity.PROBLEM if share >= problem else Severity.WARNING
    severity = Severity.OK if share == 0 else severity
    numbers = {"share": share, **numbers}
    return Finding(check, severity, text, advice if severity is not Severity.OK else "", list(tasks), numbers)


def list_task_ids(tasks: Sequence[str]) -> str:
    """The first ids, and how many more there are."""
    more = f" and {len(tasks) - MAX_LISTED_TASKS} more" if len(tasks) > MAX_LISTED_TASKS else ""
    return ", ".join(tasks[:MAX_LISTED_TASKS]) + more
