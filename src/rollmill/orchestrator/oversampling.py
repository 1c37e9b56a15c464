"""Over-sampling with early stop: starts more groups than needed and takes the first to finish."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from rollmill.types import Task

MAX_STOPS = 3
"""After so many stops a task is waited for, so that tasks with long completions get trained on, too."""


class StoppedTasks:
    """Queue of stopped tasks, restarted before new ones, with their numbers of stops."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._tasks: deque[tuple[Task, int]] = deque()

    def __len__(self) -> int:
        return len(self._tasks)

    def extra(self, needed: int) -> int:
        """Number of groups to start beyond those needed."""
        return math.ceil(round(self._share * needed, 9))

    def next(self) -> tuple[Task, int] | None:
        """Take the first stopped task and its number of stops; None if there is none."""
        return self._tasks.popleft() if self._tasks else None

    def add(self, task: Task, times: int) -> None:
        """Add a task that was stopped once more."""
        self._tasks.append((task, times + 1))

    def state(self) -> list[tuple[str, int]]:
        """Ids of the tasks, with their numbers of stops."""
        return [(task.id, times) for task, times in self._tasks]

    def restore(self, tasks: list[tuple[Task, int]]) -> None:
        self._tasks = deque(tasks)


@dataclass(slots=True)
class LengthBias:
    """Token counts of taken completions, and of all that were running, at their lengths so far."""

    taken_tokens: int = 0
    taken: int = 0
    tokens: int = 0
    started: int = 0

    def add(self, taken_tokens: int, taken: int, tokens: int, started: int) -> None:
        """Add counts of the taken completions and of all."""
        self.taken_tokens, self.taken = self.taken_tokens + taken_tokens, self.taken + taken
        self.tokens, self.started = self.tokens + tokens, self.started + started

    @property
    def bias(self) -> float | None:
        """Mean length of taken completions relative to that of all; None if there are none."""
        if not (self.taken and self.tokens):
            return None
        return (self.taken_tokens / self.taken) / (self.tokens / self.started)
