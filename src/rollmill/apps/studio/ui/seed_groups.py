"""Compares two settings over seeds: each run's repetitions with other seeds are found, and runs are the samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rollmill.apps.studio.ui.catalog import read_config
from rollmill.apps.studio.ui.comparison import (
    evaluated_steps,
    evaluation_scores,
    flat_config,
    is_compared,
    mean_interval,
    t_quantile,
)
from rollmill.apps.studio.ui.metric_columns import Numbers

SeedGroup = Mapping[int, Path]
"""Runs by seed, in order."""
MetricValues = Callable[[Path], Mapping[str, tuple[Numbers, Numbers]]]
"""Returns steps and values of each metric of a run."""
_MOST_SEEDS = 32


def seed_groups(runs: Iterable[Path], one: Path, other: Path) -> tuple[SeedGroup, SeedGroup] | None:
    """Find the runs that differ from `one`, or from `other`, in nothing but names and seeds.

    None if both are of one group, or neither has another seed. Of several runs with one seed the given one counts, or
    the first.

    Args:
        runs: all that may belong to a group.
    """
    (first, seed_one), (second, seed_other) = (_settings(run) for run in (one, other))
    if first == second:
        return None
    groups: tuple[dict[int, Path], dict[int, Path]] = {seed_one: one}, {seed_other: other}
    for run in runs:
        settings, seed = _settings(run)
        for wanted, group in zip((first, second), groups, strict=True):
            if settings == wanted and len(group) < _MOST_SEEDS:
                group.setdefault(seed, run)
    if max(map(len, groups)) < 2:
        return None
    a, b = (dict(sorted(group.items())) for group in groups)
    return a, b


def _settings(run: Path) -> tuple[frozenset[tuple[str, str]], int]:
    """All settings but names and seeds, and the seed."""
    config = read_config(run)
    seed = config.get("seed")
    kept = ((key, value) for key, value in flat_config(config) if key != "name" and key.split(".")[-1] != "seed")
    return frozenset(kept), seed if isinstance(seed, int) else 0


def compare_seeds(a: SeedGroup, b: SeedGroup, values: MetricValues) -> dict[str, Any]:
    """Compare two groups of runs.

    Returns:
        `a` and `b`, seed to run; `paired`, the seeds that both have; `until`, the last step that every run has;
        `metrics`, rows as of `metric_differences`, of each run's mean up to that step; `evaluations`, rows of each
        set's mean score at the newest step at which every run was evaluated (`evaluated`; None: there is none).
        `seeds_a` and `seeds_b` count the runs of a row. With two or more common seeds a row compares these, in pairs
        (the runs of a seed share tasks and order); else Welch's interval is used.
    """
    runs = [*a.values(), *b.values()]
    columns = {run: values(run) for run in runs}
    until = min(max((steps[-1] for steps, _ in columns[run].values() if len(steps)), default=0) for run in runs)
    keys = [key for key in columns[runs[0]] if is_compared(key) and all(key in columns[run] for run in runs)]

    def mean(key: str) -> Callable[[Path], float | None]:
        def of(run: Path) -> float | None:
            steps, found = columns[run][key]
            found = found[steps <= until]
            return float(np.mean(found)) if found.size else None

        return of

    metrics = [row for key in keys if (row := _compared(key, a, b, mean(key))) is not None]
    common = set.intersection(*(set(evaluated_steps(run)) for run in runs))
    evaluated = max(common, default=None)
    evaluations = [] if evaluated is None else _evaluations(a, b, evaluated)
    return {
        "a": dict(a),
        "b": dict(b),
        "paired": sorted(a.keys() & b.keys()),
        "until": int(until),
        "metrics": metrics,
        "evaluated": evaluated,
        "evaluations": evaluations,
    }


def _evaluations(a: SeedGroup, b: SeedGroup, step: int) -> list[dict[str, Any]]:
    scores = {run: evaluation_scores(run, step) for run in (*a.values(), *b.values())}
    rows = []
    for name in next(iter(scores.values())):

        def mean(run: Path, name: str = name) -> float | None:
            tasks = scores[run].get(name)
            return sum(tasks.values()) / len(tasks) if tasks else None

        if (row := _compared(name, a, b, mean)) is not None:
            rows.append(row)
    return rows


def _compared(key: str, a: SeedGroup, b: SeedGroup, value: Callable[[Path], float | None]) -> dict[str, Any] | None:
    """Compare one number of the runs; None where a side has none."""
    one, other = ({seed: found for seed, run in side.items() if (found := value(run)) is not None} for side in (a, b))
    both = sorted(one.keys() & other.keys())
    if len(both) > 1:
        one, other = ({seed: side[seed] for seed in both} for side in (one, other))
    if not one or not other:
        return None
    x, y = np.array(list(one.values())), np.array(list(other.values()))
    low, high = mean_interval(y - x) if len(both) > 1 else _welch(x, y)
    counts = {"seeds_a": len(x), "seeds_b": len(y), "paired": len(both) > 1}
    means = {"a": float(x.mean()), "b": float(y.mean()), "difference": float(y.mean() - x.mean())}
    return {"key": key, **counts, **means, "low": low, "high": high, "each": [_rounded(x), _rounded(y)]}


def _welch(x: Numbers, y: Numbers) -> tuple[float | None, float | None]:
    """95 % interval of the difference of two means (Welch 1947); None with a single run on a side."""
    if min(len(x), len(y)) < 2:
        return None, None
    of_x, of_y = x.var(ddof=1) / len(x), y.var(ddof=1) / len(y)
    difference, spread = float(y.mean() - x.mean()), float(of_x + of_y)
    if spread == 0:
        return difference, difference
    freedom = spread**2 / (of_x**2 / (len(x) - 1) + of_y**2 / (len(y) - 1))
    half = t_quantile(max(float(freedom), 1.0)) * math.sqrt(spread)
    return difference - half, difference + half


def _rounded(values: Sequence[float] | Numbers) -> list[float]:
    return [float(f"{value:.5g}") for value in values]
