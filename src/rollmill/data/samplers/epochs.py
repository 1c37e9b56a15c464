"""Every task once per epoch: shuffled, as it stands, or easy ones first."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from rollmill.config.order import EasyToHardOrder, OrderSection, ShuffledOrder
from rollmill.data.samplers.base import Floats, Ints, Sampler, counter_rng, decode_array, encode_array
from rollmill.data.samplers.skip_uniform import UniformGroupSkipper
from rollmill.data.samplers.success_rates import SuccessTracker, build_success_tracker
from rollmill.data.taskset import Taskset
from rollmill.types import Task


class EpochSampler(Sampler):
    """Goes through the tasks epoch after epoch, `shuffled` or `sequential`; `order.skip_uniform` leaves some out.

    What is left out is decided when an epoch begins. Where that would be every task, epochs pass until one comes again.
    """

    def __init__(self, taskset: Taskset, order: OrderSection, seed: int) -> None:
        super().__init__(taskset, order, seed)
        self._shuffled = isinstance(order, ShuffledOrder)
        self._skipping = UniformGroupSkipper(len(taskset.tasks), order.skip_uniform)
        self._epoch, self._cursor = 0, 0
        self._line: Sequence[int] | Ints = self._permuted()

    @property
    def epoch(self) -> int:
        return self._epoch

    def next(self, step: int = 0) -> Task:
        if self._cursor == len(self._line):
            self._cursor = 0
            self._epoch = max(self._epoch + 1, self._skipping.first() if self._skipping.epochs else 0)
            self._line = self._due(self._permuted())
        task = self._taskset.tasks[self._line[self._cursor]]
        self._cursor += 1
        return task

    def observe(self, task_id: str, successes: Sequence[float]) -> None:
        if self.uses_success and (number := self._numbers.get(task_id)) is not None:
            self._skipping.observe(number, successes, self._epoch)

    def metrics(self) -> dict[str, float]:
        return {"tasks/epoch": self._epoch, **self._skipping.metrics(self._epoch)} if self.uses_success else {}

    def progress(self) -> dict[str, Any]:
        place = {"epoch": self._epoch, "cursor": self._cursor}
        if not self._skipping.epochs:
            return place
        return {**place, **self._skipping.state_dict(), "line": encode_array(np.array(self._line, np.int64))}

    def resume(self, state: dict[str, Any]) -> None:
        self._epoch, self._cursor = state["epoch"], state["cursor"]
        self._skipping.load_state_dict(state)
        self._line = decode_array(state["line"], np.int64) if "line" in state else self._permuted()

    def _due(self, line: Sequence[int] | Ints) -> Sequence[int] | Ints:
        due = self._skipping.due(self._epoch)
        if due is None:
            return line
        numbers = np.asarray(line, np.int64)
        return numbers[due[numbers]]

    def _permuted(self) -> Sequence[int] | Ints:
        numbers = list(range(len(self._taskset.tasks)))
        if self._shuffled:
            random.Random(f"{self._seed}:{self._epoch}").shuffle(numbers)
        return numbers


class EasyToHardSampler(EpochSampler):
    """The easy tasks of each epoch first, by a column or by the tracked success rate when the epoch begins."""

    def __init__(self, taskset: Taskset, order: EasyToHardOrder, seed: int) -> None:
        self._success: SuccessTracker | None = None
        self._difficulty: Floats = np.zeros(len(taskset.tasks))
        super().__init__(taskset, order, seed)
        if order.by == "difficulty":
            self._difficulty = self._column(order.column, "order easy_to_hard")
        else:
            self._success = build_success_tracker(order, len(taskset.tasks), self._column)
        self._line = self._permuted()

    def observe(self, task_id: str, successes: Sequence[float]) -> None:
        super().observe(task_id, successes)
        if self._success is not None and (number := self._numbers.get(task_id)) is not None:
            self._success.observe(number, successes)

    def metrics(self) -> dict[str, float]:
        known = {} if self._success is None else self._success.metrics()
        return {"tasks/epoch": self._epoch, **super().metrics(), **known}

    def progress(self) -> dict[str, Any]:
        known = {} if self._success is None else self._success.state_dict()
        return {**super().progress(), "line": encode_array(np.array(self._line, np.int64)), **known}

    def resume(self, state: dict[str, Any]) -> None:
        super().resume(state)
        if self._success is not None:
            self._success.load_state_dict(state)

    def _permuted(self) -> Ints:
        difficulty = self._difficulty if self._success is None else 1 - self._success.rates()
        ties = counter_rng(self._seed, self._epoch).random(len(difficulty))
        return np.lexsort((ties, difficulty)).astype(np.int64)
