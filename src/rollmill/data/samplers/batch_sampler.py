"""Samplers without epochs: draw a batch of different tasks at once, by success rate or difficulty."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from rollmill.config.samplers import (
    CurriculumSamplerSection,
    PosteriorSamplerSection,
    PrioritisedSamplerSection,
    SuccessRateSamplerSection,
)
from rollmill.data.samplers.base import Bools, Floats, Ints, Sampler, counter_rng, decode_array, encode_array
from rollmill.data.samplers.success_rates import UniformGroupSkipper, build_success_tracker
from rollmill.data.taskset import Taskset
from rollmill.types import Task


class BatchSampler(Sampler):
    """Draws `batch` tasks at once, with a few passes over arrays of [tasks].

    A batch repeats a task only if fewer tasks are eligible than it needs. Random numbers depend on the seed and the
    number of the draw.
    """

    def __init__(self, order: SuccessRateSamplerSection, taskset: Taskset, seed: int, batch: int) -> None:
        super().__init__(order, taskset, seed)
        size = len(taskset.tasks)
        self._size, self._batch = size, batch
        self._success = build_success_tracker(order, size, self._column)
        self._skipping = UniformGroupSkipper(size, order.skip_uniform)
        self._draws, self._handed_out = 0, 0
        self._ready: list[int] = []  #: drawn and not yet handed out, in order
        self._drawn: Ints = np.zeros(size, np.int64)  #: number of draws of each task

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
        """Mask of the tasks that may be drawn in this step, [tasks]; None for all. At least one is True."""

    @abstractmethod
    def _keys(self, random: np.random.Generator) -> Floats:
        """A key for each task, [tasks]: those with the smallest keys are drawn."""

    def _draw(self, step: int) -> list[int]:
        allowed = self._allowed(step)
        drawn: list[int] = []
        while len(drawn) < self._batch:  # once, unless fewer tasks are eligible than the batch needs
            keys = self._keys(counter_rng(self._seed, self._draws))
            self._draws += 1
            numbers = np.arange(self._size) if allowed is None else np.flatnonzero(allowed)
            chosen = numbers[_least(keys[numbers], self._batch - len(drawn))]
            self._drawn[chosen] += 1
            drawn += chosen.tolist()
        return drawn

    def _allowed(self, step: int) -> Bools | None:
        """Mask of eligible tasks that are not skipped; if there is none, those whose skipping ends first."""
        eligible, epoch = self._eligible(step), self._handed_out // self._size
        due = self._skipping.due(epoch)
        if due is None:
            return eligible
        allowed = due if eligible is None else due & eligible
        return allowed if allowed.any() else self._skipping.soonest(eligible)


def _least(keys: Floats, count: int) -> Ints:
    """Indices of the `count` smallest keys, in ascending order of the key."""
    if count < len(keys):
        places = np.argpartition(keys, count)[:count]
        return places[np.argsort(keys[places], kind="stable")]
    return np.argsort(keys, kind="stable")


class WeightedSampler(BatchSampler):
    """Draws tasks in proportion to weights, without replacement within a batch.

    Uses exponential keys (Efraimidis and Spirakis, 2006).
    """

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
    """P(task) proportional to max(1 - success rate, `order.floor`) (Kimi k1.5, arXiv:2501.12599)."""

    def __init__(self, order: PrioritisedSamplerSection, taskset: Taskset, seed: int, batch: int) -> None:
        super().__init__(order, taskset, seed, batch)
        self._floor = order.floor

    def _weights(self) -> Floats:
        weights: Floats = np.maximum(1 - self._success.rates(), self._floor)
        return weights


class PosteriorSampler(BatchSampler):
    """Thompson sampling: draws a success rate from each task's Beta posterior and takes the tasks nearest to
    `order.target`.

    Tasks that were seldom rolled out have wide posteriors, so that they are explored.
    """

    def __init__(self, order: PosteriorSamplerSection, taskset: Taskset, seed: int, batch: int) -> None:
        super().__init__(order, taskset, seed, batch)
        self._target = order.target

    def _eligible(self, step: int) -> Bools | None:
        return None

    def _keys(self, random: np.random.Generator) -> Floats:
        return np.abs(random.beta(*self._success.parameters()) - self._target)


class CurriculumSampler(BatchSampler):
    """All tasks for `order.warmup` steps, then only hard ones, beyond `order.bound` (Kimi k1.5, arXiv:2501.12599).

    While no task is hard, all are eligible. The least often drawn tasks come first, with random ties. Hard tasks repeat
    within a batch if there are too few.
    """

    def __init__(self, order: CurriculumSamplerSection, taskset: Taskset, seed: int, batch: int) -> None:
        super().__init__(order, taskset, seed, batch)
        self._warmup, self._bound = order.warmup, order.bound
        by_column = order.by == "difficulty"
        self._difficulty = self._column(order.column, "order curriculum") if by_column else None
        self._warm = True  #: True if the ready tasks were drawn in the warm-up

    def next(self, step: int = 0) -> Task:
        if (step < self._warmup) != self._warm:
            self._warm = step < self._warmup
            np.subtract.at(self._drawn, self._ready, 1)  # discarded, so they do not count as drawn
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
