"""Ratios, tables and result files."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import machine
from bench.harness import RESULTS, Measured


@dataclass
class Case:
    """One comparison of ours with a peer, round by round, in `unit`. Ratios above 1 mean that ours is better."""

    case: str
    peer_name: str
    unit: str
    ours: list[float]
    peer: list[float]
    higher_is_better: bool
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def ratios(self) -> list[float]:
        """Ratio of ours to the peer in each round."""
        pairs = zip(self.ours, self.peer, strict=True)
        return [ours / peer if self.higher_is_better else peer / ours for ours, peer in pairs]

    @property
    def best_ratio(self) -> float:
        """Ratio of the best rounds of both, which disturbances by other programs touch least."""
        if self.higher_is_better:
            return max(self.ours) / max(self.peer)
        return min(self.peer) / min(self.ours)

    def summary(self) -> dict[str, Any]:
        """Summary of the case: medians, the ratio with its range over the rounds, and that of the best rounds."""
        return {
            "case": self.case,
            "peer_name": self.peer_name,
            "unit": self.unit,
            "ours": _round(statistics.median(self.ours)),
            "peer": _round(statistics.median(self.peer)),
            "ratio": round(statistics.median(self.ratios), 3),
            "ratio_min": round(min(self.ratios), 3),
            "ratio_max": round(max(self.ratios), 3),
            "ratio_best": round(self.best_ratio, 3),
            "rounds": len(self.ratios),
            **self.extra,
        }


def best(measured: Sequence[Measured], key: str, higher_is_better: bool) -> Measured:
    """The contestant with the best median."""
    pick = max if higher_is_better else min
    return pick(measured, key=lambda one: statistics.median(one.values(key)))


def finish(
    bench: str,
    cases: Sequence[Case],
    *,
    headline: Sequence[Case] | None = None,
    versions: dict[str, Any],
    threads: int = 1,
    only_json: bool,
    folder: Path = RESULTS,
    raw: Sequence[Measured] = (),
    machine_info: dict[str, Any] | None = None,
    done: bool = True,
) -> None:
    """Print the table, write `folder`/BENCH.json and end with the one JSON line.

    A long benchmark calls this after each case with `done` false, which writes the file only: a stopped run keeps what
    it measured. The line's ratio is that of the worst case among `headline` (default: all cases).
    """
    summaries = [case.summary() for case in cases]
    worst = min((case.summary() for case in headline or cases), key=lambda one: one["ratio"])
    line = {
        "bench": bench,
        "ours": worst["ours"],
        "peer": worst["peer"],
        "unit": worst["unit"],
        "ratio": worst["ratio"],
        "ratio_min": worst["ratio_min"],
        "ratio_max": worst["ratio_max"],
        "threads": threads,
        "machine": machine_info or machine.describe(),
        "case": worst["case"],
        "peer_name": worst["peer_name"],
    }
    folder.mkdir(parents=True, exist_ok=True)
    record = {
        **line,
        "versions": versions,
        "cases": summaries,
        "raw": [{"name": one.name, "ready": one.ready, "rounds": one.rounds} for one in raw],
    }
    (folder / f"{bench}.json").write_text(json.dumps(record, indent=1) + "\n")
    if done and not only_json:
        print(table(summaries))
    if done:
        print(json.dumps(line))


def table(summaries: Sequence[dict[str, Any]]) -> str:
    """Format case summaries as a plain-text table."""
    rows = [("case", "peer", "ours", "peer's", "unit", "ratio", "min", "max", "best")]
    for one in summaries:
        keys = ("case", "peer_name", "ours", "peer", "unit", "ratio", "ratio_min", "ratio_max", "ratio_best")
        rows.append(tuple(str(one[key]) for key in keys))  # type: ignore[arg-type]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def _round(value: float) -> float:
    return float(f"{value:.4g}")
