"""The order in which tasks are handed out: every task once per epoch."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, Literal

from rollmill.core.errors import TasksetError
from rollmill.core.types import Task
from rollmill.tasks.taskset import Taskset


class Sampler:
    """Hands out the tasks of a taskset forever, epoch after epoch.

    Args:
        taskset: not empty.
        order: `sequential`, or `shuffled` differently in each epoch.
        seed: what the shuffling derives from, together with the epoch.
    """

    def __init__(self, taskset: Taskset, order: Literal["shuffled", "sequential"], seed: int) -> None:
        assert taskset.tasks
        self._taskset, self._shuffled, self._seed = taskset, order == "shuffled", seed
        self._identity = {
            "size": len(taskset.tasks),
            "fingerprint": taskset.fingerprint(),
            "order": order,
            "seed": seed,
        }
        self._epoch, self._cursor = 0, 0
        self._permutation = self._permuted()

    @property
    def epoch(self) -> int:
        """Epoch of the task that `next` returned last, from 0."""
        return self._epoch

    def next(self, step: int = 0) -> Task:
        """The next task; `step` is the training step (of the stage, from 0) that asks."""
        if self._cursor == len(self._permutation):
            self._epoch, self._cursor = self._epoch + 1, 0
            self._permutation = self._permuted()
        task = self._taskset.tasks[self._permutation[self._cursor]]
        self._cursor += 1
        return task

    def observe(self, task_id: str, successes: Sequence[float]) -> None:
        """Take note of the success (0 to 1) of a task's completions."""

    def metrics(self) -> dict[str, float]:
        """What the sampler knows, for the step's metrics."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Where the sampler is, as plain JSON."""
        return {"epoch": self._epoch, "cursor": self._cursor, **self._identity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken.

        Raises:
            TasksetError: the state is of another taskset, order or seed.
        """
        for key, value in self._identity.items():
            if state[key] != value:
                raise TasksetError(
                    f"taskset {self._taskset.name} changed since the checkpoint ({key} was {state[key]}, is {value}); "
                    "restore it to resume this run, or start a new run"
                )
        self._epoch, self._cursor = state["epoch"], state["cursor"]
        self._permutation = self._permuted()

    def _permuted(self) -> list[int]:
        indices = list(range(len(self._taskset.tasks)))
        if self._shuffled:
            random.Random(f"{self._seed}:{self._epoch}").shuffle(indices)
        return indices


def build_sampler(taskset, order, seed, *, batch):
    return Sampler(taskset, order, seed)
