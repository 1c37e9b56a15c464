"""Reinforcement learning repairs what imitation taught wrongly: reward and held-out accuracy rise, in every mode."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from support.forks import Forks, forks
from support.tiny import tiny_run

RAY = {"name": "ray", "explorers": 1}


def has_learned(out: Path) -> list[dict[str, Any]]:
    """The rows of its steps, if accuracies and rewards of a run rose as they should."""
    summary = json.loads((out / "summary.json").read_text())
    assert summary["accuracy_before"] < 0.7
    assert summary["accuracy_after"] > summary["accuracy_before"] + 0.2
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    trained = [row for row in rows if "reward/mean" in row]
    assert len(trained) == 30
    sampled = [row["eval/sampled"] for row in rows if "eval/sampled" in row]
    assert sampled[-1] > sampled[0] + 0.05
    rewards = [row["reward/mean"] for row in trained]
    assert mean(rewards[-10:]) > mean(rewards[:5]) + 0.05
    return trained


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("max_staleness", [1, pytest.param(0, marks=pytest.mark.thorough)])
def test_reward_goes_up(server: Forks, tmp_path: Path, repair: dict[str, Any], max_staleness: int) -> None:
    tiny_run(tmp_path, **repair, max_staleness=max_staleness)
    ended = server.run("run", "run.yaml", "--out", "out", folder=tmp_path)
    assert ended.code == 0, ended.err
    trained = has_learned(tmp_path / "out")
    assert [row["staleness/max"] for row in trained] == [min(max_staleness, step) for step in range(len(trained))]
    assert all(row["logprob_gap/max"] < 1e-4 for row in trained if row.get("logprob_gap/max") is not None)
    assert trained[0]["logprob_gap/max"] < 1e-4


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("max_staleness", [4, 0])
def test_reward_goes_up_on_ray(server: Forks, tmp_path: Path, repair: dict[str, Any], max_staleness: int) -> None:
    pytest.importorskip("ray", reason="needs the extra `ray`")
    tiny_run(tmp_path, **repair, max_staleness=max_staleness, placement=RAY)
    ended = server.run("run", "run.yaml", "--out", "out", folder=tmp_path)
    assert ended.code == 0, ended.err
    assert max(row["staleness/max"] for row in has_learned(tmp_path / "out")) <= max_staleness


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_reward_goes_up_with_an_explorer_beside_the_trainer(
    server: Forks, tmp_path: Path, repair: dict[str, Any]
) -> None:
    tiny_run(tmp_path, **repair, max_staleness=2, buffer={"store": "sql"})
    with forks() as other:
        other.start("run", "run.yaml", "--out", "out", "--set", "mode=explore", folder=tmp_path)
        ended = server.run("run", "run.yaml", "--out", "out", "--set", "mode=train", folder=tmp_path)
        assert ended.code == 0, ended.err
        explored = other.wait()
    assert explored.code == 0, explored.err
    assert max(row["staleness/max"] for row in has_learned(tmp_path / "out")) <= 2
