"""Reinforcement learning repairs what imitation taught wrongly: reward and held-out accuracy rise."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from forks import Forks
from tiny import tiny_run

FUNCTION = "rollmill.quickstart.addition:rows"
TASKS = {"function": FUNCTION, "options": {"size": 2000, "seed": 1, "digits": 2, "forget": 0.65}}
HELD_OUT = {"function": FUNCTION, "options": {"size": 100, "seed": 2, "digits": 2}}
MODEL = {"hidden_size": 96, "layers": 2, "heads": 4, "kv_heads": 2, "intermediate_size": 256, "initializer_range": 0.06}
COMMON: dict[str, Any] = {"taskset": TASKS, "stages": None, "checkpoint": {"every": 1000}}
BATCH, STEPS = 16, 30


@pytest.fixture(scope="module")
def imitator(server: Forks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that learned addition from a teacher who forgets most carries."""
    folder = tmp_path_factory.mktemp("imitator")
    tiny_run(
        folder,
        **COMMON,
        model={"new": MODEL},
        algorithm={"name": "sft", "batch": 32},
        steps=260,
        trainer={"lr": 3e-3, "schedule": "cosine", "warmup_steps": 20},
        rewards=None,
        rollout=None,
        evaluation=None,
    )
    ended = server.run("run", "run.yaml", "--out", "sft", folder=folder)
    assert ended.code == 0, ended.err
    return folder / "sft/checkpoints/step-000260"


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_reward_goes_up(server: Forks, tmp_path: Path, imitator: Path, max_staleness: int) -> None:
    tiny_run(
        tmp_path,
        **COMMON,
        model={"path": str(imitator), "new": None},
        algorithm={"name": "grpo"},
        steps=STEPS,
        max_staleness=max_staleness,
        rewards=[{"name": "exact", "after": "#"}],
        trainer={"lr": 1e-4},
        rollout={"batch": BATCH, "group_size": 8, "max_new_tokens": 28},
        evaluation={"taskset": HELD_OUT, "every": STEPS},
    )
    ended = server.run("run", "run.yaml", "--out", "out", folder=tmp_path)
    assert ended.code == 0, ended.err
    summary = json.loads((tmp_path / "out/summary.json").read_text())
    assert summary["accuracy_before"] < 0.7
    assert summary["accuracy_after"] > summary["accuracy_before"] + 0.2
    rows = [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    start, trained = rows[0], rows[1:]
    assert rows[-1]["eval/sampled"] > start["eval/sampled"] + 0.05
    rewards = [row["reward/mean"] for row in trained]
    assert mean(rewards[-10:]) > mean(rewards[:5]) + 0.05
    assert [row["staleness/max"] for row in trained] == [min(max_staleness, step) for step in range(STEPS)]
    assert all(row["logprob_gap/max"] < 1e-4 for row in trained if row.get("logprob_gap/max") is not None)
    assert trained[0]["logprob_gap/max"] < 1e-4
