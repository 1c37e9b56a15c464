"""What a task operator sees and reports to: all tasks of a set, and what became of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from rollmill.types import Task


@dataclass(slots=True)
class TaskOperatorReport:
    """What one operator did to a taskset. Tasks stand by their id."""

    taskset: str
    operator: str
    seen: int
    dropped: dict[str, str] = field(default_factory=dict)  #: task -> why
    changed: set[str] = field(default_factory=set)
    changes: Counter[str] = field(default_factory=Counter)  #: what was changed -> in how many tasks

    @property
    def kept(self) -> int:
        """Tasks that are still there."""
        return self.seen - len(self.dropped)

    def __str__(self) -> str:
        """One line: numbers, and reasons with the most frequent first."""
        words = [f"{self.kept} of {self.seen} tasks kept"]
        if self.changed:
            words.append(f"{len(self.changed)} changed ({_counts(self.changes)})")
        if self.dropped:
            words.append(f"{len(self.dropped)} dropped ({_counts(Counter(self.dropped.values()))})")
        return f"taskset {self.taskset}: {self.operator}: {', '.join(words)}"


class TaskBatch:
    """All tasks of a set, on their way through an operator, which changes them in place and says so.

    Reasons are short constant words such as `too long`: the report counts them.
    """

    def __init__(self, tasks: Sequence[Task], report: TaskOperatorReport) -> None:
        self.report = report
        self._tasks = list(tasks)
        self._ids = {task.id for task in tasks}

    def check(self) -> None:
        """Raises ValueError where an operator gave a task another id: reports, states and ratings go by ids."""
        if {task.id for task in self._tasks} != self._ids:
            raise ValueError("it changed the id of a task; write what you need into task.metadata")

    @property
    def tasks(self) -> list[Task]:
        """Those that are still there, in order. A copy: dropping while looping is fine."""
        return [task for task in self._tasks if task.id not in self.report.dropped]

    def drop(self, task: Task, why: str) -> None:
        """Take a task out. Raises ValueError for one that is not there."""
        if task.id in self.report.dropped or task.id not in self._ids:
            raise ValueError(f"task {task.id} is dropped, and it is not there")
        self.report.dropped[task.id] = why

    def change(self, task: Task, why: str) -> None:
        """Note that a task was changed. Its id has to stay."""
        self.report.changed.add(task.id)
        self.report.changes[why] += 1

    def reorder(self, tasks: Sequence[Task]) -> None:
        """Put the tasks that are still there into another order. Raises ValueError where they are not the same."""
        if len(tasks) != len(self.tasks) or {task.id for task in tasks} != {task.id for task in self.tasks}:
            raise ValueError("arrange takes the same tasks in another order; take tasks out by drop")
        self._tasks = list(tasks)


def _counts(counts: Counter[str]) -> str:
    return ", ".join(f"{why} {count}" for why, count in counts.most_common())
