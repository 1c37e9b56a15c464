"""Over-sampling with an early stop: more groups are started than are needed, and the first ones are taken."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from rollmill.types import Task

MAX_STOPS = 3
"""How often a task is stopped before it is waited for: a task whose completions are always long has its turn, too."""


class StoppedTasks:
    """Tasks that were stopped and come again first, in the order they were stopped; with how often they were."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._tasks: deque[tuple[Task, int]] = deque()

    def __len__(self) -> int:
        return len(self._tasks)

    def extra(self, needed: int) -> int:
        """How many more groups to start than are needed."""
        return math.ceil(round(self._share * needed, 9))

    def next(self) -> tuple[Task, int] | None:
        """The first of them, with how often it was stopped; None where there is none."""
        return self._tasks.popleft() if self._tasks else None

    def add(self, task: Task, times: int) -> None:
        """A task was stopped once more."""
        self._tasks.append((task, times + 1))

    def state(self) -> list[tuple[str, int]]:
        """The tasks' ids, with how often each was stopped."""
        return [(task.id, times) for task, times in self._tasks]

    def restore(self, tasks: list[tuple[Task, int]]) -> None:
        """Inverse of `state`."""
        self._tasks = deque(tasks)


@dataclass(slots=True)
class LengthBias:
    """Tokens of completions that are taken, and of all that were under way, as long as they are so far."""

    taken_tokens: int = 0
    taken: int = 0
    tokens: int = 0
    started: int = 0

    def add(self, taken_tokens: int, taken: int, tokens: int, started: int) -> None:
        """Add what was taken, and everything."""
        self.taken_tokens, self.taken = self.taken_tokens + taken_tokens, self.taken + taken
        self.tokens, self.started = self.tokens + tokens, self.started + started

    @property
    def bias(self) -> float | None:
        """Mean length of what is taken, in mean lengths of everything; None where there is nothing."""
        if not (self.taken and self.tokens):
            return None
        return (self.taken_tokens / self.taken) / (self.tokens / self.started)
