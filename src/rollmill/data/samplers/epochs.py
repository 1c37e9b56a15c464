"""Samplers with epochs: every task once per epoch (shuffled, sequential or easy ones first), and mixtures."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rollmill.config.samplers import EasyToHardSamplerSection, SamplerSection, ShuffledSamplerSection
from rollmill.data.samplers.base import Floats, Ints, Sampler, counter_rng, decode_array, encode_array
from rollmill.data.samplers.success_rates import SuccessTracker, UniformGroupSkipper, build_success_tracker
from rollmill.data.taskset import MixtureComponent, Taskset
from rollmill.types import Task, task_domain


class EpochSampler(Sampler):
    """Iterates over the tasks in epochs, `shuffled` or `sequential`; `order.skip_uniform` skips some.

    Skipped tasks are determined when an epoch starts. If that is every task, the next epoch with a task starts instead.
    """

    def __init__(self, order: SamplerSection, taskset: Taskset, seed: int) -> None:
        super().__init__(order, taskset, seed)
        self._shuffled = isinstance(order, ShuffledSamplerSection)
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
    """Easy tasks of each epoch first, by a column or by the tracked success rate at the start of the epoch."""

    def __init__(self, order: EasyToHardSamplerSection, taskset: Taskset, seed: int) -> None:
        self._success: SuccessTracker | None = None
        self._difficulty: Floats = np.zeros(len(taskset.tasks))
        super().__init__(order, taskset, seed)
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


class MixtureSampler(Sampler):
    """Draws from several tasksets in proportion to their weights; each has its own order.

    The taskset furthest behind its share is next, so that after n draws each has its share of n within one (for two
    tasksets; within a few for more).

    Args:
        taskset: has `mixed`; `task.taskset` names the component of a task. Components without tasks are left out.
        build: builds the sampler of a component from its taskset, its entry, its index and its share.
    """

    def __init__(
        self, taskset: Taskset, seed: int, build: Callable[[Taskset, MixtureComponent, int, float], Sampler]
    ) -> None:
        super().__init__(ShuffledSamplerSection(), taskset, seed)
        tasks: dict[str, list[Task]] = {each.name: [] for each in taskset.mixed}
        for task in taskset.tasks:
            tasks[task.taskset].append(task)
        found = [each for each in taskset.mixed if tasks[each.name]]
        total = sum(each.weight for each in found)
        self._shares = {each.name: each.weight / total for each in found}
        self._sets = {
            each.name: build(Taskset(each.name, tasks[each.name], []), each, number, each.weight / total)
            for number, each in enumerate(found)
        }
        self._identity["order"] = {name: [share, self._sets[name]._identity] for name, share in self._shares.items()}
        self._drawn = dict.fromkeys(self._sets, 0)
        self.uses_success = any(each.uses_success for each in self._sets.values())

    @property
    def epoch(self) -> int:
        """Smallest epoch of the components."""
        return min(each.epoch for each in self._sets.values())

    def next(self, step: int = 0) -> Task:
        count = sum(self._drawn.values()) + 1
        name = max(self._sets, key=lambda each: self._shares[each] * count - self._drawn[each])
        self._drawn[name] += 1
        return self._sets[name].next(step)

    def observe(self, task_id: str, successes: Sequence[float]) -> None:
        each = self._sets.get(task_domain(task_id))
        if each is not None:
            each.observe(task_id, successes)

    def metrics(self) -> dict[str, float]:
        count = sum(self._drawn.values())
        found: dict[str, float] = {}
        for name, each in self._sets.items():
            found[f"tasks/{name}/share"] = self._drawn[name] / count if count else 0.0
            found |= {f"tasks/{name}/{key.removeprefix('tasks/')}": value for key, value in each.metrics().items()}
            found[f"tasks/{name}/epoch"] = each.epoch
        return found

    def progress(self) -> dict[str, Any]:
        return {"drawn": dict(self._drawn), "sets": {name: each.progress() for name, each in self._sets.items()}}

    def resume(self, state: dict[str, Any]) -> None:
        self._drawn = dict(state["drawn"])
        for name, each in self._sets.items():
            each.resume(state["sets"][name])
