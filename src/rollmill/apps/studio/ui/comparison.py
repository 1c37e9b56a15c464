"""Compares two runs: their run files, their metrics over common steps, and evaluations task by task."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rollmill.apps.studio.ui.catalog import read_config
from rollmill.apps.studio.ui.metric_columns import MetricColumns
from rollmill.errors import RollmillError
from rollmill.files import read_json_object

_BATCHES = 20
_EVALUATIONS = 20
"""Newest evaluations in which a common one is looked for."""
_T_975 = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
"""97.5 % quantiles of Student's t for 1 to 15 degrees of freedom; beyond, `t_quantile` approximates."""


def config_difference(one: Path, other: Path) -> list[dict[str, Any]]:
    """Keys of the run files whose values differ, as `key`, `a` and `b` (YAML-like text; None: not there)."""
    a, b = (dict(flat_config(read_config(run))) for run in (one, other))
    keys = dict.fromkeys([*a, *b])
    return [{"key": key, "a": a.get(key), "b": b.get(key)} for key in keys if a.get(key) != b.get(key)]


def flat_config(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Leaves as (dotted key, JSON text); empty containers are leaves."""
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from flat_config(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list) and any(isinstance(each, dict | list) for each in value):
        for number, inner in enumerate(value):
            name = inner.get("name") if isinstance(inner, dict) else None
            yield from flat_config(inner, f"{key}[{name or number}]")
    else:
        yield key, json.dumps(value, ensure_ascii=False, default=str)


def metric_differences(a: MetricColumns, b: MetricColumns, first: int, last: int) -> list[dict[str, Any]]:
    """Means of every common metric over the steps that both runs have, and their difference.

    Neighbouring steps are alike, so the interval comes from means of up to 20 batches of consecutive steps (the method
    of batch means), which are nearly independent.

    Returns:
        Rows with `key`, `steps`, `a`, `b`, `difference` (b - a) and `low`, `high`, its 95 % interval (None below 4
        steps).
    """
    rows = []
    for key in a.keys:
        if key not in b.keys or not is_compared(key):
            continue
        (steps_a, values_a), (steps_b, values_b) = a.values(key), b.values(key)
        common, at_a, at_b = np.intersect1d(steps_a, steps_b, return_indices=True)
        chosen = (common >= first) & (common <= last)
        one, other = values_a[at_a[chosen]], values_b[at_b[chosen]]
        if not one.size:
            continue
        low, high = _interval(other - one)
        difference = float(np.mean(other - one))
        mean_a, mean_b = float(np.mean(one)), float(np.mean(other))
        rows.append(
            {"key": key, "steps": int(one.size), "a": mean_a, "b": mean_b}
            | {"difference": difference, "low": low, "high": high}
        )
    return rows


def is_compared(key: str) -> bool:
    """False for metrics whose mean says nothing: versions, and bounds of intervals."""
    return key != "version" and not key.endswith(("_low", "_high"))


def _interval(differences: npt.NDArray[np.float64]) -> tuple[float | None, float | None]:
    """95 % interval of the mean of a series, by batch means."""
    batches = min(_BATCHES, len(differences) // 2)
    if batches < 2:
        return None, None
    means = np.array([each.mean() for each in np.array_split(differences, batches)])
    return mean_interval(means)


def mean_interval(values: npt.NDArray[np.float64]) -> tuple[float, float]:
    """95 % interval of the mean of independent values, [N] with N > 1."""
    half = t_quantile(len(values) - 1) * float(values.std(ddof=1)) / math.sqrt(len(values))
    return float(values.mean()) - half, float(values.mean()) + half


def t_quantile(freedom: float) -> float:
    """97.5 % quantile of Student's t with at least 1 degree of freedom (beyond 15 by its expansion at infinity; within
    0.1 %). A fraction is rounded down, so that an interval is rather too wide."""
    if freedom < len(_T_975) + 1:
        return _T_975[int(freedom) - 1]
    z = 1.959964
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def evaluation_differences(one: Path, other: Path) -> dict[str, Any]:
    """Compare the newest evaluation that both runs made after the same step, task by task.

    Returns:
        `step` (None: there is none), and `sets`, each with `name`, `tasks` (common ones), mean scores `a` and `b`,
        `difference` with `low` and `high`, its paired 95 % interval, and the number of tasks that are `better`, `worse`
        and `equal` in the other run. A task's score is its share of correct samples, or else its greedy reward.
    """
    steps_a, steps_b = (evaluated_steps(run) for run in (one, other))
    common = sorted(set(steps_a) & set(steps_b))
    if not common:
        return {"step": None, "sets": []}
    step = common[-1]
    scores_a, scores_b = (evaluation_scores(run, step) for run in (one, other))
    sets = [
        _paired(name, scores_a[name], scores_b[name])
        for name in scores_a
        if name in scores_b and set(scores_a[name]) & set(scores_b[name])
    ]
    return {"step": step, "sets": sets}


def _paired(name: str, a: dict[str, float], b: dict[str, float]) -> dict[str, Any]:
    tasks = [task for task in a if task in b]
    one, other = np.array([a[task] for task in tasks]), np.array([b[task] for task in tasks])
    differences = other - one
    low, high = mean_interval(differences) if len(tasks) > 1 else (None, None)
    return {
        "name": name,
        "tasks": len(tasks),
        "a": float(one.mean()),
        "b": float(other.mean()),
        "difference": float(differences.mean()),
        "low": low,
        "high": high,
        "better": int((differences > 0).sum()),
        "worse": int((differences < 0).sum()),
        "equal": int((differences == 0).sum()),
    }


def evaluated_steps(run: Path) -> list[int]:
    """Steps of the newest evaluations of a run, in order."""
    names = (path.stem.removeprefix("step-") for path in (run / "evaluations").glob("step-*.json"))
    return sorted(int(name) for name in names if name.isdigit())[-_EVALUATIONS:]


def evaluation_scores(run: Path, step: int) -> dict[str, dict[str, float]]:
    """Score of every task of an evaluation, by set. Damaged entries are left out."""
    try:
        data = read_json_object(run / "evaluations" / f"step-{step:06d}.json")
    except RollmillError:
        return {}
    found: dict[str, dict[str, float]] = {}
    for each in _dicts(data.get("sets")):
        tasks = found.setdefault(str(each.get("name") or ""), {})
        for task in _dicts(each.get("tasks")):
            correct, rewards = task.get("correct"), task.get("rewards")
            if isinstance(correct, int | float) and isinstance(rewards, list) and rewards:
                tasks[str(task.get("id"))] = correct / len(rewards)
            elif greedy := _numbers(task.get("greedy")):
                tasks[str(task.get("id"))] = sum(greedy) / len(greedy)
    return {name: tasks for name, tasks in found.items() if tasks}


def _dicts(value: object) -> Iterable[dict[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _numbers(value: object) -> list[float]:
    return [float(each) for each in value if isinstance(each, int | float)] if isinstance(value, list) else []
