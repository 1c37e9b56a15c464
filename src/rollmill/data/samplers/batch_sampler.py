"""Samplers without epochs: a batch of different tasks at a time, chosen among all of them by what is known so far."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from rollmill.config.order import SuccessRateOrder
from rollmill.data.samplers.base import Bools, Floats, Ints, Sampler, counter_rng, decode_array, encode_array
from rollmill.data.samplers.skip_uniform import UniformGroupSkipper
from rollmill.data.samplers.success_rates import build_success_tracker
from rollmill.data.taskset import Taskset
from rollmill.types import Task


class BatchSampler(Sampler):
    """Draws `batch` tasks at once: a few passes over arrays of [tasks], however many tasks there are.

    No task comes twice in a batch while others may come. Random numbers depend on the seed and the number of the draw.
    """

    def __init__(self, taskset: Taskset, order: SuccessRateOrder, seed: int, batch: int) -> None:
        super().__init__(taskset, order, seed)
        size = len(taskset.tasks)
        self._size, self._batch = size, batch
        self._success = build_success_tracker(order, size, self._column)
        self._skipping = UniformGroupSkipper(size, order.skip_uniform)
        self._draws, self._handed_out = 0, 0
        self._ready: list[int] = []  #: drawn and not yet handed out, in order
        self._drawn: Ints = np.zeros(size, np.int64)  #: how often each task was drawn

    @property
    def epoch(self) -> int:
        return max(self._handed_out - 1, 0) // self._size

    def next(self, step: int = 0) -> Task:
        if not self._ready:
            self._ready = self._draw(step)
        self._handed_out += 1
        return self._taskset.tasks[self._ready.pop(0)]

    def observe(self, task_id: str, successes: Sequence[float]) -> None:
        number = self._numbers.get(task_id)
        if number is not None and self.uses_success:
            self._success.observe(number, successes)
            self._skipping.observe(number, successes, self.epoch)

    def metrics(self) -> dict[str, float]:
        known = self._success.metrics() if self.uses_success else {}
        return {"tasks/epoch": self.epoch, **known, **self._skipping.metrics(self.epoch)}

    def progress(self) -> dict[str, Any]:
        return {
            "draws": self._draws,
            "handed_out": self._handed_out,
            "ready": list(self._ready),
            "drawn": encode_array(self._drawn),
            **self._success.state_dict(),
            **self._skipping.state_dict(),
        }

    def resume(self, state: dict[str, Any]) -> None:
        self._draws, self._handed_out = state["draws"], state["handed_out"]
        self._ready = list(state["ready"])
        self._drawn = decode_array(state["drawn"], np.int64)
        self._success.load_state_dict(state)
        self._skipping.load_state_dict(state)

    @abstractmethod
    def _eligible(self, step: int) -> Bools | None:
        """Which tasks may come in this step, [tasks]; None: all. Never none."""

    @abstractmethod
    def _keys(self, random: np.random.Generator) -> Floats:
        """A number for each task, [tasks]: those with the least ones come."""

    def _draw(self, step: int) -> list[int]:
        allowed = self._allowed(step)
        drawn: list[int] = []
        while len(drawn) < self._batch:  # once, unless fewer tasks may come than a batch has places
            keys = self._keys(counter_rng(self._seed, self._draws))
            self._draws += 1
            numbers = np.arange(self._size) if allowed is None else np.flatnonzero(allowed)
            chosen = numbers[_least(keys[numbers], self._batch - len(drawn))]
            self._drawn[chosen] += 1
            drawn += chosen.tolist()
        return drawn

    def _allowed(self, step: int) -> Bools | None:
        """Eligible tasks that are not left out. Where that is none, those come that were left out longest."""
        eligible, epoch = self._eligible(step), self._handed_out // self._size
        due = self._skipping.due(epoch)
        if due is None:
            return eligible
        allowed = due if eligible is None else due & eligible
        return allowed if allowed.any() else self._skipping.soonest(eligible)


def _least(keys: Floats, count: int) -> Ints:
    """Places of the `count` least keys, the least first."""
    if count < len(keys):
        places = np.argpartition(keys, count)[:count]
        return places[np.argsort(keys[places], kind="stable")]
    return np.argsort(keys, kind="stable")
