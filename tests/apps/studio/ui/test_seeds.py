"""Settings compared over seeds: which runs belong together, and the intervals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from support.ui_runs import config, evaluation, make_run, served, step_row

from rollmill.apps.studio.ui.metric_columns import MetricColumns, Numbers
from rollmill.apps.studio.ui.seed_groups import compare_seeds, seed_groups
from rollmill.trackers.metrics_log import MetricsLog


def repeated(folder: Path, name: str, seeds: list[int], gain: float, **changes: Any) -> list[Path]:
    """Runs of one setting, 20 steps and two evaluations each."""
    made = []
    for seed in seeds:
        run = folder / f"{name}-{seed}"
        config(run, seed=seed, **changes)
        rng, log = np.random.default_rng(seed), MetricsLog(run / "metrics.jsonl")
        own = gain + float(rng.normal(0, 0.002))
        for step in range(1, 21):
            log.append(step_row(step, rng, own))
            if step % 10 == 0:
                log.append({"step": step, "stage": "train", **evaluation(run, step, own)})
        log.close()
        made.append(run)
    return made


def values(run: Path) -> dict[str, tuple[Numbers, Numbers]]:
    table = MetricColumns(run / "metrics.jsonl")
    table.refresh()
    return {key: table.values(key) for key in table.keys}


def rewards(runs: list[Path]) -> Numbers:
    return np.array([values(run)["reward/mean"][1].mean() for run in runs])


def test_runs_that_differ_in_seeds_and_names_belong_together(tmp_path: Path) -> None:
    slow, fast = repeated(tmp_path, "slow", [0, 1, 2], 0.01), repeated(tmp_path, "fast", [1, 2, 5], 0.02, threads=2)
    other = repeated(tmp_path, "other", [7], 0.02, threads=3)
    twice = repeated(tmp_path, "again", [1], 0.01)
    runs = [*other, *twice, *fast, *slow]
    found = seed_groups(runs, slow[1], fast[0])
    assert found is not None
    assert list(found[0].items()) == [(0, slow[0]), (1, slow[1]), (2, slow[2])]
    assert list(found[1].items()) == list(zip((1, 2, 5), fast, strict=True))
    assert seed_groups(runs, slow[0], slow[1]) is None
    assert seed_groups([*other, *fast[:1]], other[0], fast[0]) is None


def test_equal_seeds_are_compared_in_pairs(tmp_path: Path) -> None:
    slow, fast = repeated(tmp_path, "slow", [0, 1, 2, 3], 0.01), repeated(tmp_path, "fast", [1, 2, 3], 0.02, threads=2)
    groups = seed_groups([*slow, *fast], slow[0], fast[0])
    assert groups is not None
    found = compare_seeds(*groups, values)
    assert (found["paired"], found["until"], found["evaluated"]) == ([1, 2, 3], 20, 20)
    [row] = [row for row in found["metrics"] if row["key"] == "reward/mean"]
    x, y = rewards(slow[1:]), rewards(fast)
    half = 4.303 * (y - x).std(ddof=1) / 3**0.5
    assert (row["low"], row["high"]) == pytest.approx(((y - x).mean() - half, (y - x).mean() + half), rel=1e-3)
    assert (row["a"], row["b"], row["seeds_a"], row["seeds_b"]) == pytest.approx((x.mean(), y.mean(), 3, 3))
    [accuracy] = found["evaluations"]
    assert accuracy["difference"] == pytest.approx(accuracy["b"] - accuracy["a"])
    assert accuracy["low"] <= accuracy["difference"] <= accuracy["high"]


def test_other_seeds_have_welchs_interval(tmp_path: Path) -> None:
    """With three runs of equal variance on each side there are 4 degrees of freedom."""
    numbers = {tmp_path / str(value): float(value) for value in (1, 2, 3, 11, 12, 13)}

    def single(run: Path) -> dict[str, tuple[Numbers, Numbers]]:
        return {"kl": (np.array([1.0]), np.array([numbers[run]])), "version": (np.array([1.0]), np.array([1.0]))}

    runs = list(numbers)
    groups = dict(enumerate(runs[:3])), dict(enumerate(runs[3:], start=7))
    [row] = compare_seeds(*groups, single)["metrics"]
    half = 2.776 * (2 / 3) ** 0.5
    assert (row["difference"], row["low"], row["high"]) == pytest.approx((10, 10 - half, 10 + half), rel=1e-3)
    assert (row["key"], row["each"]) == ("kl", [[1, 2, 3], [11, 12, 13]])
    [row] = compare_seeds(groups[0], {7: runs[3]}, single)["metrics"]
    assert (row["difference"], row["low"], row["high"]) == (9, None, None)


def test_seeds_through_the_server(tmp_path: Path) -> None:
    repeated(tmp_path, "slow", [0, 1], 0.01)
    repeated(tmp_path, "fast", [0, 1], 0.02, threads=2)
    make_run(tmp_path / "alone", 3, threads=9)
    with served(tmp_path) as site, httpx.Client(base_url=site.address) as client:
        found = client.get("/api/seeds", params={"a": "slow-0", "b": "fast-1"}).json()
        assert (found["a"], found["b"]) == ({"0": "slow-0", "1": "slow-1"}, {"0": "fast-0", "1": "fast-1"})
        assert found["paired"] == [0, 1]
        assert client.get("/api/seeds", params={"a": "slow-0", "b": "slow-1"}).json() is None
        assert client.get("/api/seeds", params={"a": "slow-0", "b": "nothing"}).status_code == 404
