"""Metrics as columns: what was read piece by piece is what a fresh reading gives, and thinning out keeps means."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmill.apps.studio.ui.metric_columns import ColumnCache, MetricColumns
from rollmill.trackers.metrics_log import MetricsLog


def content(columns: MetricColumns) -> dict[str, Any]:
    """All that is stored."""
    found = {key: [each.tolist() for each in columns.values(key)] for key in columns.keys}
    found = {key: points for key, points in found.items() if points[0]}  # keys of dropped rows have none
    return {"steps": list(columns.steps), **found, "seconds": columns.axis("seconds").tolist()}


def fresh(path: Path) -> dict[str, Any]:
    columns = MetricColumns(path)
    columns.refresh()
    return content(columns)


ACTIONS = st.lists(st.sampled_from(["step", "step", "step", "evaluation", "resume", "refresh"]), max_size=25)


@settings(max_examples=60, deadline=None)
@given(actions=ACTIONS)
def test_reading_piece_by_piece_gives_what_is_in_the_file(
    actions: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """An evaluation replaces the file with a longer last row, a resumed run with fewer rows."""
    path = tmp_path_factory.mktemp("run") / "metrics.jsonl"
    log, columns, step = MetricsLog(path), MetricColumns(path), 0
    for number, action in enumerate(actions):
        if action == "step":
            step += 1
            log.append(
                {"step": step, "stage": "a", "loss": 0.5 * number, "tokens": 3, "seconds/total": 1.0, "text": "x"}
            )
        elif action == "evaluation" and step:
            log.append({"step": step, "stage": "a", "eval/greedy": number / 100, "seconds/eval": 0.5})
        elif action == "resume":
            step //= 2
            log.close()
            rows = [json.loads(line) for line in path.read_text().splitlines()]
            path.unlink()
            path.write_text("".join(json.dumps(row) + "\n" for row in rows if row["step"] <= step))
            log = MetricsLog(path)
        else:
            columns.refresh()
    columns.refresh()
    assert content(columns) == fresh(path)
    log.close()


def test_what_is_torn_damaged_or_no_number(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        '{"step": 1, "loss": 1, "huge": 1e999, "big": ' + "9" * 400 + ', "name": "x", "yes": true, "none": null}\n'
        'not JSON\n[1]\n{"loss": 2}\n{"step": 2, "loss": 2}\n{"step": 3, "lo'
    )
    columns = MetricColumns(path)
    columns.refresh()
    assert (list(columns.steps), columns.keys, columns.damaged) == ([1, 2], ["loss"], 3)
    with path.open("a") as file:
        file.write('ss": 3}\n')
    columns.refresh()
    assert columns.values("loss")[1].tolist() == [1.0, 2.0, 3.0]


def test_a_file_that_has_the_inode_of_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 1}\n{"step": 2, "loss": 2}\n')
    columns = MetricColumns(path)
    columns.refresh()
    with path.open("r+") as file:
        file.write('{"step": 1, "loss": 1}\n{"step": 2, "loss": 2, "eval/greedy": 0.5}\n{"step": 3, "loss": 3}\n')
    columns.refresh()
    assert content(columns) == fresh(path)
    assert list(columns.steps) == [1, 2, 3]


def test_a_missing_file_is_an_empty_one(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    columns = MetricColumns(path)
    columns.refresh()
    assert (columns.keys, len(columns.curve("loss").x)) == ([], 0)
    path.write_text('{"step": 1, "loss": 1}\n')
    columns.refresh()
    path.unlink()
    columns.refresh()
    assert columns.keys == []


def test_axes_stages_and_ranges(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    rows: list[dict[str, Any]] = [
        {"step": 0, "stage": "a", "eval/greedy": 0.1, "seconds/eval": 2.0},
        {"step": 1, "stage": "a", "loss": 1.0, "tokens": 10, "seconds/total": 1.0},
        {"step": 2, "stage": "b", "loss": 2.0, "tokens": 20, "seconds/total": 1.5, "seconds/checkpoint": 0.5},
        {"step": 3, "stage": "b", "loss": 3.0, "tokens": 30, "seconds/total": 1.0},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    columns = MetricColumns(path)
    columns.refresh()
    assert columns.curve("loss", "tokens").x.tolist() == [10.0, 30.0, 60.0]
    assert columns.curve("loss", "seconds").x.tolist() == [3.0, 5.0, 6.0]
    assert columns.curve("loss", stage="b").y.tolist() == [2.0, 3.0]
    assert columns.curve("loss", stage="c").y.tolist() == []
    assert columns.curve("loss", low=2.5, high=2.6).x.tolist() == [2.0, 3.0]  # one beyond each end


def test_thinning_out_keeps_the_mean_and_the_extremes(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    values = np.random.default_rng(0).normal(size=1000)
    path.write_text("".join(json.dumps({"step": n, "loss": value}) + "\n" for n, value in enumerate(values)))
    columns = MetricColumns(path)
    columns.refresh()
    curve = columns.curve("loss", points=100)
    assert curve.low is not None
    assert curve.high is not None
    assert len(curve.x) == 100
    assert curve.y.mean() == pytest.approx(values.mean())
    assert (curve.low.min(), curve.high.max()) == (values.min(), values.max())
    assert (curve.low <= curve.y).all()
    assert (curve.y <= curve.high).all()
    assert columns.curve("loss", points=1000).y.tolist() == values.tolist()


def test_the_cache_forgets_what_was_not_looked_at(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text("".join(f'{{"step": {n}, "loss": 1}}\n' for n in range(100)))
    cache = ColumnCache(most_bytes=7000)  # two of them
    a = cache.get(tmp_path / "a")
    assert cache.get(tmp_path / "b").bytes == a.bytes == pytest.approx(3000, rel=0.2)
    assert cache.get(tmp_path / "a") is a
    cache.get(tmp_path / "c")
    assert cache.get(tmp_path / "a") is a
    assert len(cache._columns) == 2
