"""All tasks for some steps, then only hard ones (Kimi k1.5, arXiv:2501.12599)."""

from __future__ import annotations

from typing import Any

import numpy as np

from rollmill.config.order import CurriculumOrder
from rollmill.data.samplers.base import Bools, Floats
from rollmill.data.samplers.batch_sampler import BatchSampler
from rollmill.data.taskset import Taskset
from rollmill.types import Task


class CurriculumSampler(BatchSampler):
    """For `order.warmup` steps all tasks, then those beyond `order.bound`; all again while there is no such task.

    Among the tasks that may come, those come first that were drawn least often, at random where they are equal. Fewer
    hard tasks than places in a batch come several times in it.
    """

    def __init__(self, taskset: Taskset, order: CurriculumOrder, seed: int, batch: int) -> None:
        super().__init__(taskset, order, seed, batch)
        self._warmup, self._bound = order.warmup, order.bound
        by_column = order.by == "difficulty"
        self._difficulty = self._column(order.column, "order curriculum") if by_column else None
        self._warm = True  #: the tasks that are ready were drawn in the warm-up

    def next(self, step: int = 0) -> Task:
        if (step < self._warmup) != self._warm:
            self._warm = step < self._warmup
            np.subtract.at(self._drawn, self._ready, 1)  # they will not come
            self._ready = []
        return super().next(step)

    def metrics(self) -> dict[str, float]:
        return {**super().metrics(), "tasks/hard": float(self._hard().mean())}

    def progress(self) -> dict[str, Any]:
        return {**super().progress(), "warm": self._warm}

    def resume(self, state: dict[str, Any]) -> None:
        super().resume(state)
        self._warm = state["warm"]

    def _hard(self) -> Bools:
        if self._difficulty is not None:
            return self._difficulty >= self._bound
        return self._success.rates() <= self._bound

    def _eligible(self, step: int) -> Bools | None:
        hard = None if step < self._warmup else self._hard()
        return None if hard is None or not hard.any() else hard

    def _keys(self, random: np.random.Generator) -> Floats:
        keys: Floats = self._drawn + random.random(self._size)
        return keys
