"""Sampler of a stage with domains: draws from each in proportion to its share, and leaves out one that is paused."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rollmill.config.domains import DomainConfig, MixingConfig
from rollmill.data.samplers.base import Sampler
from rollmill.data.samplers.mixture import MixtureSampler
from rollmill.data.taskset import MixtureComponent, Taskset
from rollmill.types import Task, task_domain

_EQUAL = 1e-9
_log = logging.getLogger(__name__)


class DomainSampler(MixtureSampler):
    """Draws tasks of several domains by their shares, which may change from step to step.

    A domain's credit grows by its share with each draw; the one with the most credit is next and pays 1. So the share
    of every domain in any window of draws is met within one task (for two domains; within a few for more).

    Args:
        taskset: has `mixed`, one component per domain.
        domains: the sections, by name.
        build: builds the sampler of a component from its taskset, its entry, its index and its share.
        clock: seconds, for pauses.
    """

    def __init__(
        self,
        taskset: Taskset,
        seed: int,
        build: Callable[[Taskset, MixtureComponent, int, float], Sampler],
        *,
        domains: Mapping[str, DomainConfig],
        mixing: MixingConfig,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(taskset, seed, build)
        self._domains = {name: domains[name] for name in self._sets}
        sizes = {name: sum(task.taskset == name for task in taskset.tasks) for name in self._sets}
        self._sizes = sizes if mixing.by == "size" else dict.fromkeys(sizes, 1)
        self._mixing, self._clock = mixing, clock
        weights = {name: each.model_dump(mode="json")["weight"] for name, each in self._domains.items()}
        self._identity["order"] = {"mixing": mixing.by} | {
            name: [weights[name], each._identity] for name, each in self._sets.items()
        }
        self._credit = dict.fromkeys(self._sets, 0.0)
        self._need = dict.fromkeys(self._sets, 1.0)  # share of groups whose rewards differ; at first all may
        self._paused_until: dict[str, float] = {}
        self._pauses = dict.fromkeys(self._sets, 0)  # in a row

    def next(self, step: int = 0) -> Task:
        shares = self.shares(step)
        for name, share in shares.items():
            self._credit[name] += share
        name = max(shares, key=lambda each: self._credit[each])
        self._credit[name] -= 1
        self._drawn[name] += 1
        return self._sets[name].next(step)

    def shares(self, step: int) -> dict[str, float]:
        """Return the shares of the domains that are drawn from at a training step; their sum is 1."""
        weights = {name: each.weight_at(step) * self._sizes[name] for name, each in self._domains.items()}
        if self._mixing.by == "need":
            weights = {name: weight * self._factor(name) for name, weight in weights.items()}
        active = {name: weight for name, weight in weights.items() if weight > 0 and not self.is_paused(name)}
        active = active or {name: weight for name, weight in weights.items() if weight > 0} or dict.fromkeys(weights, 1)
        total = sum(active.values())
        return {name: weight / total for name, weight in active.items()}

    def observe_rewards(self, task_id: str, rewards: Sequence[float]) -> None:
        """Record the rewards of a group: whether they differ says whether its domain still teaches."""
        name = task_domain(task_id)
        if name not in self._need or not rewards:
            return
        self._pauses[name] = 0
        teaches = float(max(rewards) - min(rewards) > _EQUAL)
        self._need[name] += (teaches - self._need[name]) / self._mixing.memory

    # -- pauses ------------------------------------------------------------------------------------------------

    def is_paused(self, name: str) -> bool:
        """True while a domain is left out."""
        return self._clock() < self._paused_until.get(name, -np.inf)

    def pause(self, name: str, reason: str) -> bool:
        """Leave a domain out for a while; False if it was paused too often, or no other domain is left.

        Failures during a pause belong to the same one.
        """
        if self.is_paused(name):
            return True
        others = [each for each in self._sets if each != name and not self.is_paused(each)]
        if self._pauses[name] >= self._mixing.pauses or not others:
            return False
        seconds = self._mixing.pause_s * 2.0 ** self._pauses[name]
        self._pauses[name] += 1
        self._paused_until[name] = self._clock() + seconds
        text = "domain %s is paused for %g s (pause %d of %d in a row): %s; %s go on"
        _log.warning(text, name, seconds, self._pauses[name], self._mixing.pauses, reason, ", ".join(others))
        return True

    # -- metrics and state -------------------------------------------------------------------------------------

    def metrics(self) -> dict[str, float]:
        found = super().metrics()
        for name in self._sets:
            if self._mixing.by == "need":
                found[f"tasks/{name}/need"] = self._need[name]
            if name in self._paused_until:
                found[f"tasks/{name}/paused"] = float(self.is_paused(name))
        return found

    def progress(self) -> dict[str, Any]:
        return super().progress() | {"credit": dict(self._credit), "need": dict(self._need)}

    def resume(self, state: dict[str, Any]) -> None:
        super().resume(state)
        self._credit, self._need = dict(state["credit"]), dict(state["need"])

    def _factor(self, name: str) -> float:
        """Return a domain's need relative to the mean, within the bounds of `mixing`."""
        mean = float(np.mean(list(self._need.values())))
        relative = self._need[name] / mean if mean > 0 else 1.0
        return min(max(relative, self._mixing.least), self._mixing.most)
