"""Finding runs, their states from heartbeats, and what is not to be read."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from support.ui_runs import config, dead_pid, evaluation, heartbeat, killed_run, make_run

from rollmill.apps.serve.web import RequestRefusedError
from rollmill.apps.studio.ui.catalog import RunCard, RunCatalog
from rollmill.apps.studio.ui.comparison import config_difference, evaluation_differences, metric_differences
from rollmill.apps.studio.ui.metric_columns import MetricColumns
from rollmill.apps.studio.ui.run_details import step_timeline
from rollmill.errors import ConfigError
from rollmill.trackers.heartbeat import keep_heartbeat
from rollmill.trackers.metrics_log import write_summary


def cards(root: Path) -> dict[str, RunCard]:
    return {card.id: card for card in RunCatalog(root).cards()}


def test_runs_are_found_in_folders(tmp_path: Path) -> None:
    for name in ("a", "sweep/b", "sweep/deep/c", "sweep/deep/too/far/d", ".hidden/e"):
        config(tmp_path / name)
    (tmp_path / "no-run").mkdir()
    assert set(cards(tmp_path)) == {"a", "sweep/b", "sweep/deep/c"}
    assert set(cards(tmp_path / "a")) == {"."}
    with pytest.raises(ConfigError, match="is no folder"):
        RunCatalog(tmp_path / "nowhere")


def test_states_come_from_the_heartbeats(tmp_path: Path) -> None:
    for name in ("alive", "dead", "failed", "ended", "silent"):
        make_run(tmp_path / name, 10)
    heartbeat(tmp_path / "dead", dead_pid())
    heartbeat(tmp_path / "failed", dead_pid(), ended="failed: no memory")
    heartbeat(tmp_path / "ended", dead_pid(), ended="done")
    write_summary(tmp_path / "ended", {"status": "done", "accuracy_after": 0.5})
    with keep_heartbeat(tmp_path / "alive", "trainer"):
        found = cards(tmp_path)
    assert {name: card.state for name, card in found.items()} == {
        "alive": "running",
        "dead": "killed",
        "failed": "failed",
        "ended": "done",
        "silent": "unknown",
    }
    one = found["alive"]
    assert (one.step, one.steps, one.stage, one.algorithms, one.model) == (
        10,
        40,
        "train",
        ["grpo"],
        "checkpoints/tiny",
    )
    assert one.seconds_per_step == pytest.approx(1.3)
    assert one.accuracy == 0.4


def test_a_card_follows_the_files(tmp_path: Path) -> None:
    run = killed_run(tmp_path / "run")
    catalog = RunCatalog(tmp_path)
    [before] = catalog.cards()
    assert before.restarts == 1
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 23, "stage": "train", "seconds/total": 1.3, "reward/mean": 0.75}\n')
    [after] = catalog.cards()
    assert (after.step, after.reward) == (23, 0.75)
    assert after.revision != before.revision


def test_an_evaluation_long_ago_and_a_long_timeline_are_found(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 10)
    rows = [
        {"step": n, "stage": "train", "seconds/total": float(n), **{f"m{k}": 0.5 for k in range(100)}}
        for n in range(11, 500)
    ]
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    [card] = RunCatalog(tmp_path).cards()
    assert (card.step, card.accuracy, card.seconds_per_step) == (499, 0.4, 497.0)
    with (run / "timeline.jsonl").open("a") as file:
        file.write(
            json.dumps({"step": 20, "seconds": 1, "spans": {"generate": [[0.0, 0.123456, 1.0]] * 40_000}}) + "\n"
        )
    assert step_timeline(run, None)["steps"] == [10, 20]


@pytest.mark.parametrize(
    "text", ["", "[1, 2]", "stages: 7", "stages: [{steps: x}]", "name: {a: b}\nmodel: 3", "a: [", "\x00"]
)
def test_a_damaged_run_file_hides_nothing_else(tmp_path: Path, text: str) -> None:
    run = make_run(tmp_path / "run", 10)
    (run / "config.yaml").write_text(text)
    (run / "summary.json").write_text("{")
    (run / "events.jsonl").write_text("not JSON\n")
    [card] = RunCatalog(tmp_path).cards()
    assert (card.step, card.steps, card.state) == (10, None, "unknown")


@pytest.mark.parametrize(
    "id", ["..", "../outside", "/etc", "a/../../outside", "nowhere", "\x00", "a\x00", "a" * 5000, "link"]
)
def test_nothing_outside_of_the_folder_is_a_run(tmp_path: Path, id: str) -> None:
    config(tmp_path / "outside")
    config(tmp_path / "runs" / "a")
    os.symlink(tmp_path / "outside", tmp_path / "runs" / "link")
    catalog = RunCatalog(tmp_path / "runs")
    with pytest.raises(RequestRefusedError, match="there is no run"):
        catalog.find(id)
    assert [card.id for card in catalog.cards()] == ["a"]


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl", "events.jsonl", "rollouts"])
def test_a_run_whose_files_are_elsewhere_is_not_shown(tmp_path: Path, name: str) -> None:
    outside = make_run(tmp_path / "outside", 10)
    (outside / "events.jsonl").write_text("")
    run = tmp_path / "runs" / "a"
    config(run)
    (run / "config.yaml").rename(run / "other.yaml")
    (run / "rollouts").mkdir()
    if name == "rollouts":
        (run / "rollouts").rmdir()
    os.symlink(outside / name, run / name)
    catalog = RunCatalog(tmp_path / "runs")
    assert catalog.cards() == []
    with pytest.raises(RequestRefusedError, match="is a link that leaves"):
        catalog.find("a")


# -- two runs --------------------------------------------------------------------------------------------------


def columns(path: Path, rows: list[dict[str, float]]) -> MetricColumns:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = MetricColumns(path)
    found.refresh()
    return found


def test_metrics_are_paired_by_step(tmp_path: Path) -> None:
    """Differences 1, 2, 3, 4 in batches of two: means 1.5 and 3.5, so 2.5 +- 12.71 * 1."""
    a = columns(tmp_path / "a", [{"step": n, "loss": 1.0, "only": 1.0} for n in range(0, 5)])
    b = columns(tmp_path / "b", [{"step": n, "loss": 1.0 + n, "version": 1} for n in range(1, 9)])
    [row] = metric_differences(a, b, 0, 100)
    assert (row["key"], row["steps"], row["a"], row["b"], row["difference"]) == ("loss", 4, 1.0, 3.5, 2.5)
    assert (row["low"], row["high"]) == (pytest.approx(2.5 - 12.71), pytest.approx(2.5 + 12.71))
    [short] = metric_differences(a, b, 2, 3)
    assert (short["steps"], short["difference"], short["low"]) == (2, 2.5, None)
    assert metric_differences(a, b, 50, 60) == []


def test_evaluations_are_paired_by_task(tmp_path: Path) -> None:
    """Of 40 tasks, 8 are solved by one and 16 by the other: the difference is 8 ones and 32 zeros."""
    for name, gain in (("a", 0.0), ("b", 0.02)):
        (tmp_path / name).mkdir()
        evaluation(tmp_path / name, 10, gain)
    evaluation(tmp_path / "a", 20, 0.0)
    found = evaluation_differences(tmp_path / "a", tmp_path / "b")
    [one] = found["sets"]
    assert (found["step"], one["tasks"], one["a"], one["b"]) == (10, 40, 0.2, 0.4)
    assert (one["better"], one["worse"], one["equal"]) == (8, 0, 32)
    spread = 2.0227 * (0.2 * 0.8 * 40 / 39) ** 0.5 / 40**0.5  # t with 39 degrees of freedom
    assert (one["low"], one["high"]) == (pytest.approx(0.2 - spread, abs=1e-4), pytest.approx(0.2 + spread, abs=1e-4))
    assert evaluation_differences(tmp_path / "a", tmp_path)["step"] is None


def test_run_files_are_compared_key_by_key(tmp_path: Path) -> None:
    rewards = [{"name": "exact", "weight": 1.0}, {"name": "format", "weight": 0.5}]
    config(tmp_path / "a", name="same", rewards=rewards)
    config(tmp_path / "b", name="same", rewards=[rewards[1] | {"weight": 0.25}], plugins=[])
    found = config_difference(tmp_path / "a", tmp_path / "b")
    assert {row["key"]: (row["a"], row["b"]) for row in found} == {
        "rewards[exact].name": ('"exact"', None),
        "rewards[exact].weight": ("1.0", None),
        "rewards[format].weight": ("0.5", "0.25"),
        "plugins": (None, "[]"),
    }
