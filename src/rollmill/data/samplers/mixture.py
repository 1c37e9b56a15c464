"""Sampler of a mixture: draws from several tasksets, each with a sampler of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rollmill.data.samplers.base import Sampler
from rollmill.data.taskset import MixtureComponent, Taskset
from rollmill.types import Task, task_domain


class MixtureSampler(Sampler):
    """Draws from several tasksets in proportion to their weights; each has its own sampler.

    The taskset furthest behind its share is next, so that after n draws each has its share of n within one (for two
    tasksets; within a few for more).

    Args:
        taskset: has `mixed`; `task.taskset` names the component of a task. Components without tasks are left out.
        build: builds the sampler of a component from its taskset, its entry, its index and its share.
    """

    def __init__(
        self, taskset: Taskset, seed: int, build: Callable[[Taskset, MixtureComponent, int, float], Sampler]
    ) -> None:
        self.begin(taskset, seed, None)
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

    @property
    def uses_success(self) -> bool:
        return any(each.uses_success for each in self._sets.values())

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
