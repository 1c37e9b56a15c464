"""Trackers of services get a run and its resume: read back by each service's own package."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.sources import PYTHONPATH
from support.tiny import tiny_run

from rollmill.trackers import read_metrics

ROOT = Path(__file__).resolve().parents[2]
OWN = ROOT / ".venv-trackers/bin/python"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not OWN.is_file(), reason="needs .venv-trackers/bin/python: make trackers-setup"),
]


@pytest.fixture(scope="module")
def tracked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run whose last two steps were repeated, and what each service has of it."""
    folder = tmp_path_factory.mktemp("tracked")
    trackers = [
        {"name": "wandb", "mode": "offline", "names": "trl", "tags": ["sums"], "completions": 2},
        {"name": "mlflow", "uri": f"sqlite:///{folder}/mlflow.db", "names": "verl", "completions": 1},
        {"name": "trackio"},
        {"name": "swanlab", "mode": "offline", "completions": 1},
        {"name": "aim", "repo": str(folder / "aim"), "names": "trl", "completions": 2},
    ]
    tiny_run(
        folder,
        monitor={"trackers": trackers, "report": False},
        stages=[{"name": "only", "algorithm": {"name": "grpo"}, "steps": 4, "trainer": {"lr": 1e-3}}],
        evaluation={"samples": 2, "k": [2], "every": 4},
    )
    environment = os.environ | {"PYTHONPATH": PYTHONPATH, "TRACKIO_DIR": str(folder / "trackio")}
    program = [str(OWN), str(Path(__file__).parents[1] / "support/tracked_run.py"), str(folder)]
    done = subprocess.run(
        program, cwd=folder, env=environment, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "failed and is not used" not in done.stderr, done.stderr[-2000:]
    return folder / "run", json.loads(done.stdout)


def test_wandb_offline_has_one_run_with_its_settings_and_trl_names(tracked: tuple[Path, dict[str, Any]]) -> None:
    run, found = tracked
    assert len(found["wandb"]["ids"]) == 1
    assert found["wandb"]["settings"]["stages"][0]["trainer"]["lr"] == 1e-3
    steps = [row for row in found["wandb"]["rows"] if "loss" in row]
    assert [row["step"] for row in steps] == [1, 2, 3, 4, 3, 4]
    written = {row["step"]: row for row in read_metrics(run)}
    for row in steps:
        ours = written[row["step"]]
        assert row["train/reward"] == row["reward/mean"] == pytest.approx(ours["reward/mean"])
        assert row["train/rewards/exact/mean"] == pytest.approx(ours["reward/exact"])
        assert row["train/learning_rate"] == pytest.approx(ours["lr"])
        assert "completions" in {key.partition("/")[0] for key in row}
    assert sorted({row["step"] for row in found["wandb"]["rows"] if "eval/greedy" in row}) == [0, 4]


def test_mlflow_has_one_run_with_parameters_and_verl_names(tracked: tuple[Path, dict[str, Any]]) -> None:
    run, found = tracked
    mlflow, written = found["mlflow"], {row["step"]: row for row in read_metrics(run)}
    assert mlflow["runs"] == ["FINISHED"]
    assert mlflow["params"]["stages.0.trainer.lr"] == "0.001"
    assert sorted({step for step, _ in mlflow["history"]["loss"]}) == [1, 2, 3, 4]
    for name, ours in (("critic/rewards/mean", "reward/mean"), ("actor/grad_norm", "grad_norm"), ("loss", "loss")):
        assert all(value == pytest.approx(written[step][ours]) for step, value in mlflow["history"][name])
    assert {step for step, _ in mlflow["history"]["val-core/test/acc/best_at_2/mean"]} == {0, 4}
    assert {step for step, _ in mlflow["history"]["eval/pass_at_2"]} == {0, 4}
    assert mlflow["texts"] == [f"completions/step-{step:06d}-0.txt" for step in (1, 2, 3, 4)]


def test_trackio_has_one_run_with_its_settings(tracked: tuple[Path, dict[str, Any]]) -> None:
    run, found = tracked
    assert found["trackio"]["runs"] == ["run"]
    assert found["trackio"]["settings"]["name"] == "tiny"
    written = {row["step"]: row for row in read_metrics(run)}
    steps = [row for row in found["trackio"]["rows"] if "loss" in row]
    assert sorted(row["step"] for row in steps) == [1, 2, 3, 3, 4, 4]
    assert all(row["reward/mean"] == pytest.approx(written[row["step"]]["reward/mean"]) for row in steps)


def test_swanlab_offline_has_both_parts_with_completions(tracked: tuple[Path, dict[str, Any]]) -> None:
    _, found = tracked
    assert len(found["swanlab"]["files"]) == 2
    for text in found["swanlab"]["files"]:
        assert "reward/mean" in text
        assert "eval/pass@2" in text
    assert len(found["swanlab"]["texts"]) == 6
    assert all("--- completion, reward" in text for text in found["swanlab"]["texts"])


def test_aim_has_one_run_in_which_repeated_steps_replace_earlier_ones(tracked: tuple[Path, dict[str, Any]]) -> None:
    run, found = tracked
    aim, written = found["aim"], {row["step"]: row for row in read_metrics(run)}
    assert aim["runs"] == [["run", "rollmill"]]
    assert aim["settings"]["stages"][0]["trainer"]["lr"] == 1e-3
    for name, ours in (("loss", "loss"), ("train/reward", "reward/mean")):
        history = dict(aim["history"][name])
        assert len(aim["history"][name]) == len(history)
        assert sorted(history) == [1, 2, 3, 4]
        assert all(value == pytest.approx(written[step][ours]) for step, value in history.items())
    assert {step for step, _ in aim["history"]["eval/pass@2"]} == {0, 4}
    assert len(aim["texts"]) == 8
    assert all("--- completion, reward" in text for text in aim["texts"])
