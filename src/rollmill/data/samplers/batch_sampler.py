"""Samplers without epochs: a batch of different tasks at a time, chosen among all of them by what is known so far."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from rollmill.config.order import CurriculumOrder, PosteriorOrder, PrioritisedOrder, SuccessRateOrder
from rollmill.data.samplers.base import Bools, Floats, Ints, Sampler, counter_rng, decode_array, encode_array
from rollmill.data.samplers.success_rates import UniformGroupSkipper, build_success_tracker
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


# Tasks with chances in proportion to weights: 1 - success rate (Kimi k1.5, arXiv:2501.12599), or a user's.


class WeightedSampler(BatchSampler):
    """Successive draws without replacement within a batch, by exponential keys (Efraimidis and Spirakis, 2006)."""

    @abstractmethod
    def _weights(self) -> Floats:
        """A weight of at least 0 for each task, [tasks]."""

    def _eligible(self, step: int) -> Bools | None:
        return None

    def _keys(self, random: np.random.Generator) -> Floats:
        with np.errstate(divide="ignore"):  # a weight of 0 comes last
            keys: Floats = random.standard_exponential(self._size) / self._weights()
        return keys


class PrioritisedSampler(WeightedSampler):
    """P(task) proportional to 1 - its success rate, but at least `order.floor`."""

    def __init__(self, taskset: Taskset, order: PrioritisedOrder, seed: int, batch: int) -> None:
        super().__init__(taskset, order, seed, batch)
        self._floor = order.floor

    def _weights(self) -> Floats:
        weights: Floats = np.maximum(1 - self._success.rates(), self._floor)
        return weights


# Thompson sampling of the tasks that are neither too easy nor too hard.


class PosteriorSampler(BatchSampler):
    """A success rate is drawn from each task's Beta posterior; the tasks whose draw is nearest to `order.target` come.

    Tasks that were seldom rolled out have wide posteriors, so that they come often enough to be known.
    """

    def __init__(self, taskset: Taskset, order: PosteriorOrder, seed: int, batch: int) -> None:
        super().__init__(taskset, order, seed, batch)
        self._target = order.target

    def _eligible(self, step: int) -> Bools | None:
        return None

    def _keys(self, random: np.random.Generator) -> Floats:
        return np.abs(random.beta(*self._success.parameters()) - self._target)


# All tasks for some steps, then only hard ones (Kimi k1.5, arXiv:2501.12599).


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
