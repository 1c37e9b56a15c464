"""Input and report of a task operator: the tasks of a taskset, and which were dropped or changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rollmill.config.rows import RowsSection
from rollmill.types import Task

TaskReader = Callable[[RowsSection], list[Task]]
"""Reads the rows of a further section, such as held-out tasks."""


@dataclass(slots=True)
class TaskOperatorReport:
    """Result of one operator on a taskset; tasks are identified by id."""

    taskset: str
    operator: str
    seen: int
    dropped: dict[str, str] = field(default_factory=dict)  #: task -> reason
    changed: set[str] = field(default_factory=set)
    changes: Counter[str] = field(default_factory=Counter)  #: kind of change -> number of tasks

    @property
    def kept(self) -> int:
        return self.seen - len(self.dropped)

    def __str__(self) -> str:
        """One line: counts, and reasons with the most frequent first."""
        words = [f"{self.kept} of {self.seen} tasks kept"]
        if self.changed:
            words.append(f"{len(self.changed)} changed ({_counts(self.changes)})")
        if self.dropped:
            words.append(f"{len(self.dropped)} dropped ({_counts(Counter(self.dropped.values()))})")
        return f"taskset {self.taskset}: {self.operator}: {', '.join(words)}"


class TaskBatch:
    """All tasks of a taskset during an operator, which changes them in place and records each change.

    Reasons are short constant texts such as `too long`, because the report counts them.
    """

    def __init__(self, tasks: Sequence[Task], report: TaskOperatorReport) -> None:
        self.report = report
        self._tasks = list(tasks)
        self._ids = {task.id for task in tasks}

    def check(self) -> None:
        """Raises ValueError if an operator changed the id of a task: reports, states and ratings refer to ids."""
        if {task.id for task in self._tasks} != self._ids:
            raise ValueError("it changed the id of a task; write what you need into task.metadata")

    @property
    def tasks(self) -> list[Task]:
        """Remaining tasks in order, as a copy: tasks may be dropped while looping over it."""
        return [task for task in self._tasks if task.id not in self.report.dropped]

    def drop(self, task: Task, why: str) -> None:
        """Drop a task. Raises ValueError if it is unknown or already dropped."""
        if task.id in self.report.dropped or task.id not in self._ids:
            raise ValueError(f"task {task.id} cannot be dropped: it is not in the batch")
        self.report.dropped[task.id] = why

    def change(self, task: Task, why: str) -> None:
        """Record that a task was changed. Its id must not change."""
        self.report.changed.add(task.id)
        self.report.changes[why] += 1

    def arrange(self, tasks: Sequence[Task]) -> None:
        """Reorder the remaining tasks. Raises ValueError if `tasks` are not the same tasks."""
        if len(tasks) != len(self.tasks) or {task.id for task in tasks} != {task.id for task in self.tasks}:
            raise ValueError("arrange needs the same tasks in another order; remove tasks with drop")
        self._tasks = list(tasks)


def _counts(counts: Counter[str]) -> str:
    return ", ".join(f"{why} {count}" for why, count in counts.most_common())
