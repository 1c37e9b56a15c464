"""Follows the domains of a run through its metrics, for the views, `rollmill status` and the report."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import rollmill.report.charts as charts
from rollmill.report.charts import LineChart, MetricsRow, Series
from rollmill.trackers.eval_metrics import accuracies

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
            if charts.is_plottable(value):
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


def domain_charts(rows: Sequence[MetricsRow]) -> list[LineChart | None]:
    """Draw charts with a line per domain: reward, accuracy, share of the batch, pauses."""
    shares = [batch_shares(row) for row in rows]
    names = sorted({name for each in shares for name in each})
    by_step = [
        row | {f"batch/{name}": share for name, share in each.items()} for row, each in zip(rows, shares, strict=True)
    ]

    def draw(title: str, caption: str, series: Callable[[str], Series], low: float | None = 0.0) -> LineChart | None:
        return charts.draw_line_chart(title, caption, [series(name) for name in names], by_step, low)

    sampled = {name for name in names if any(f"eval/{name}/sampled" in row for row in rows)}
    return [
        draw(
            "Reward by domain",
            "Mean of its completions in a batch",
            lambda name: Series(f"domain/{name}/reward", name, smooth=True),
            None,
        ),
        draw(
            "Accuracy by domain",
            "Share of the domain's held-out tasks solved",
            lambda name: Series(f"eval/{name}/{'sampled' if name in sampled else 'greedy'}", name, dots=True),
        ),
        draw(
            "Share of the batch",
            "Groups of the domain, of all of a step",
            lambda name: Series(f"batch/{name}", name, smooth=True),
        ),
        draw(
            "Replayed groups by domain", "Per step", lambda name: Series(f"domain/{name}/replayed", name, smooth=True)
        ),
        draw("Pauses", "1 while the domain is left out", lambda name: Series(f"tasks/{name}/paused", name)),
    ]
