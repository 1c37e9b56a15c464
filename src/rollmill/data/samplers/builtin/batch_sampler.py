"""Samplers without epochs: draw a batch of different tasks at once, by success rate or difficulty."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from pydantic import Field, PrivateAttr

from rollmill.config.samplers import DifficultySamplerSection, SuccessRateSamplerSection
from rollmill.data.samplers.base import Bools, Floats, Ints, Sampler, counter_rng, decode_array, encode_array
from rollmill.data.samplers.success_rates import SuccessTracker, UniformGroupSkipper, build_success_tracker
from rollmill.types import Task

if TYPE_CHECKING:
    from rollmill.data.taskset import Taskset


class BatchSampler(SuccessRateSamplerSection, Sampler):
    """Draws `batch` tasks at once, with a few passes over arrays of [tasks].

    A batch repeats a task only if fewer tasks are eligible than it needs. Random numbers depend on the seed and the
    number of the draw.
    """

    _size: int = PrivateAttr()
    _batch: int = PrivateAttr()
    _success: SuccessTracker = PrivateAttr()
    _skipping: UniformGroupSkipper = PrivateAttr()
    _draws: int = PrivateAttr()
    _handed_out: int = PrivateAttr()
    _ready: list[int] = PrivateAttr()  # drawn and not yet handed out, in order
    _drawn: Ints = PrivateAttr()  # number of draws of each task

    def setup(self, taskset: Taskset, seed: int, batch: int) -> None:
        self.begin(taskset, seed, self.model_dump(mode="json"))
        self._size, self._batch = len(taskset.tasks), batch
        self._success = build_success_tracker(self, self._size, self._column)
        self._skipping = UniformGroupSkipper(self._size, self.skip_uniform)
        self._draws, self._handed_out = 0, 0
        self._ready, self._drawn = [], np.zeros(self._size, np.int64)

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
    """Sampling with probability proportional to 1 - success rate (Kimi k1.5, arXiv:2501.12599, 2.3.4)."""

    name: Literal["prioritised"] = "prioritised"
    floor: float = Field(0.05, gt=0, le=1)
    """Minimum weight of a task, so that solved tasks are still visited now and then."""

    def _weights(self) -> Floats:
        weights: Floats = np.maximum(1 - self._success.rates(), self.floor)
        return weights


class PosteriorSampler(BatchSampler):
    """Thompson sampling: draws a success rate from each task's Beta posterior and picks the tasks nearest to the
    target."""

    name: Literal["posterior"] = "posterior"
    target: float = Field(0.5, ge=0, le=1)
    """Target success rate; rewards of 0 and 1 have the highest variance at 0.5."""

    def _eligible(self, step: int) -> Bools | None:
        return None

    def _keys(self, random: np.random.Generator) -> Floats:
        """Tasks that were seldom rolled out have wide posteriors, so that they are explored."""
        return np.abs(random.beta(*self._success.parameters()) - self.target)


class CurriculumSampler(BatchSampler, DifficultySamplerSection):
    """All tasks for some steps, then only hard ones (Kimi k1.5, arXiv:2501.12599, 2.3.4 and 3.5). If no task is hard,
    all are drawn."""

    name: Literal["curriculum"] = "curriculum"
    warmup: int = Field(20, ge=0)
    """Initial steps of the stage in which all tasks are drawn uniformly."""
    by: Literal["success", "difficulty"] = "success"
    """`success`: hard tasks have a low tracked success rate. `difficulty`: hard tasks have a high number in a
    column."""
    bound: float = 0.5
    """Tasks with a success rate of at most this, or a difficulty of at least this, are hard."""
    column: str = "difficulty"
    """Column with the difficulty. Only with by `difficulty`."""
    _difficulty: Floats | None = PrivateAttr()
    _warm: bool = PrivateAttr()  # True if the ready tasks were drawn in the warm-up

    def setup(self, taskset: Taskset, seed: int, batch: int) -> None:
        super().setup(taskset, seed, batch)
        self._difficulty = self._column(self.column, "sampler curriculum") if self.by == "difficulty" else None
        self._warm = True

    def next(self, step: int = 0) -> Task:
        if (step < self.warmup) != self._warm:
            self._warm = step < self.warmup
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
            return self._difficulty >= self.bound
        return self._success.rates() <= self.bound

    def _eligible(self, step: int) -> Bools | None:
        hard = None if step < self.warmup else self._hard()
        return None if hard is None or not hard.any() else hard

    def _keys(self, random: np.random.Generator) -> Floats:
        """The least often drawn tasks come first, with random ties; hard ones repeat within a batch if they are few."""
        keys: Floats = self._drawn + random.random(self._size)
        return keys
