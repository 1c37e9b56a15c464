"""Follows the domains of a run through its metrics, for the views, `rollmill status` and the report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rollmill.trackers.eval_metrics import accuracies
from rollmill.trackers.metrics_log import is_finite_number

_RECENT = 60  # rewards that are kept for a curve


@dataclass(frozen=True, slots=True)
class DomainState:
    """State of a domain after a step. `reward` and `accuracy` are the last that were measured."""

    name: str
    reward: float | None
    share: float  #: of the groups of the last step with rollouts
    accuracy: float | None
    paused: bool


class DomainProgress:
    """Follows the domains of the current stage; without domains, all it holds is empty."""

    def __init__(self, rows: Iterable[Mapping[str, Any]] = ()) -> None:
        self._stage: object = None
        self._rewards: dict[str, list[float]] = {}
        self._shares: dict[str, float] = {}
        self._paused: dict[str, bool] = {}
        self._accuracies: dict[str, float] = {}  # by evaluation set
        for row in rows:
            self.update(row)

    def update(self, row: Mapping[str, Any]) -> None:
        """Update from the metrics of a step or of an evaluation. A domain that left with its stage is forgotten."""
        if (stage := row.get("stage")) is not None and stage != self._stage:
            self._stage, self._rewards, self._shares, self._paused = stage, {}, {}, {}
        for key, value in accuracies(row).items():
            if is_finite_number(value):
                name, _, what = key.rpartition("/")
                if what == "sampled" or f"eval/{name}/sampled" not in row:
                    self._accuracies[name] = float(value)
        shares = batch_shares(row)
        if not shares:
            return
        known = dict.fromkeys([*self._shares, *shares])
        self._shares = {name: shares.get(name, 0.0) for name in known}
        for name in known:
            self._paused[name] = bool(row.get(f"tasks/{name}/paused"))
            reward = row.get(f"domain/{name}/reward")
            if isinstance(reward, float | int):
                self._rewards[name] = [*self._rewards.get(name, [])[1 - _RECENT :], float(reward)]

    @property
    def states(self) -> list[DomainState]:
        """The domains, in the order in which they were first seen."""
        return [
            DomainState(name, rewards[-1] if rewards else None, share, self._accuracies.get(name), self._paused[name])
            for name, share in self._shares.items()
            for rewards in [self.rewards(name)]
        ]

    def rewards(self, name: str) -> list[float]:
        """Mean rewards of the domain in the last steps that had some of it."""
        return self._rewards.get(name, [])


def batch_shares(row: Mapping[str, Any]) -> dict[str, float]:
    """Share of each domain in the groups of a step; empty if the step has no domains.

    A domain without groups in the step is there if the sampler names it.
    """
    groups = {
        key.split("/")[1]: value or 0.0
        for key, value in row.items()
        if key.startswith("domain/") and key.endswith("/groups")
    }
    total = sum(groups.values())
    if not total:
        return {}
    drawn = [key.split("/")[1] for key in row if key.startswith("tasks/") and key.endswith("/share")]
    return {name: groups.get(name, 0.0) / total for name in dict.fromkeys([*drawn, *groups])}
