"""The example FrozenLake learns to reach the goal: success rises clearly. (Three seeds in full: docs/guide.)"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean

import pytest
from support.forks import Forks

ROOT = Path(__file__).resolve().parents[2]
SHORTER = ["stages.1.steps=12", "evaluation.every=12", "trainer.precision=fp32"]


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_success_rises(server: Forks, tmp_path: Path) -> None:
    settings = [word for each in SHORTER for word in ("--set", each)]
    ended = server.run("run", str(ROOT / "examples/frozen_lake.yaml"), "--out", "out", *settings, folder=tmp_path)
    assert ended.code == 0, ended.err
    rows = [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    evaluated = [row["eval/sampled"] for row in rows if "eval/sampled" in row]
    practice = [row for row in rows if row["stage"] == "practice" and "reward/environment" in row]
    assert evaluated[-1] > evaluated[0] + 0.15
    rewards = [row["reward/environment"] for row in practice]
    assert mean(rewards[-5:]) > mean(rewards[:5])
    assert mean(row["episode/invalid"] for row in practice[-5:]) < 0.05
    assert all(row["environment/resets"] >= 128 and row["environment/crashes"] == 0 for row in practice)
    assert practice[0]["logprob_gap/max"] < 1e-4
