"""Samplers with epochs: every task once per epoch, shuffled, in the order of the taskset, or easy ones first."""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from pydantic import PrivateAttr

from rollmill.config.samplers import DifficultySamplerSection, SamplerSection
from rollmill.data.samplers.base import Floats, Ints, Sampler, counter_rng, decode_array, encode_array
from rollmill.data.samplers.success_rates import SuccessTracker, UniformGroupSkipper, build_success_tracker
from rollmill.types import Task

if TYPE_CHECKING:
    from rollmill.data.taskset import Taskset


class EpochSampler(SamplerSection, Sampler):
    """Base of samplers with epochs; `skip_uniform` skips some tasks.

    Skipped tasks are determined when an epoch starts. If that is every task, the next epoch with a task starts instead.
    """

    _skipping: UniformGroupSkipper = PrivateAttr()
    _epoch: int = PrivateAttr()
    _cursor: int = PrivateAttr()
    _line: Sequence[int] | Ints = PrivateAttr()

    def setup(self, taskset: Taskset, seed: int, batch: int) -> None:
        options = self.model_dump(mode="json")
        plain = options == {"name": self.name, "skip_uniform": 0}
        self.begin(taskset, seed, self.name if plain else options)
        self._skipping = UniformGroupSkipper(len(taskset.tasks), self.skip_uniform)
        self._epoch, self._cursor = 0, 0
        self._line = self._permuted()

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

    @abstractmethod
    def _permuted(self) -> Sequence[int] | Ints:
        """Indices of the tasks in the order of this epoch."""


class ShuffledSampler(EpochSampler):
    """Every task once per epoch, reshuffled in each epoch with the run's seed."""

    name: Literal["shuffled"] = "shuffled"

    def _permuted(self) -> Sequence[int]:
        numbers = list(range(len(self._taskset.tasks)))
        random.Random(f"{self._seed}:{self._epoch}").shuffle(numbers)
        return numbers


class SequentialSampler(EpochSampler):
    """Every task once per epoch, in the order of the taskset."""

    sees_sequence: ClassVar[bool] = True

    name: Literal["sequential"] = "sequential"

    def _permuted(self) -> Sequence[int]:
        return range(len(self._taskset.tasks))


class EasyToHardSampler(EpochSampler, DifficultySamplerSection):
    """Every task once per epoch, easy ones first; equally difficult ones are shuffled."""

    name: Literal["easy_to_hard"] = "easy_to_hard"
    by: Literal["difficulty", "success"] = "difficulty"
    """`difficulty`: numbers of a column. `success`: the tracked success rate at the start of the epoch."""
    column: str = "difficulty"
    """Column with the difficulty; greater is harder. Only with by `difficulty`."""
    _success: SuccessTracker | None = PrivateAttr()
    _difficulty: Floats = PrivateAttr()

    def setup(self, taskset: Taskset, seed: int, batch: int) -> None:
        self._success, self._difficulty = None, np.zeros(len(taskset.tasks))
        super().setup(taskset, seed, batch)
        if self.by == "difficulty":
            self._difficulty = self._column(self.column, "sampler easy_to_hard")
        else:
            self._success = build_success_tracker(self, len(taskset.tasks), self._column)
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
