"""A policy that learns from its teacher alone, on its own rollouts, without any reward."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.forks import Forks
from support.tiny import tiny_run
from support.toys import toy_checkpoint

FUNCTION = "rollmill.quickstart.addition:rows"
TASKS = {"function": FUNCTION, "options": {"size": 2000, "seed": 1, "digits": 2}}
HELD_OUT = {"function": FUNCTION, "options": {"size": 100, "seed": 2, "digits": 2}}
MODEL = {"hidden_size": 96, "layers": 2, "heads": 4, "kv_heads": 2, "initializer_range": 0.06}
COMMON: dict[str, Any] = {"taskset": TASKS, "stages": None}
POOR, GOOD = 120, 240  #: steps of imitation


@pytest.fixture(scope="module")
def checkpoints(server: Forks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of one run that learns to add: a poor one and a good one."""
    folder = tmp_path_factory.mktemp("teacher")
    tiny_run(
        folder,
        **COMMON,
        model={"new": MODEL},
        algorithm={"name": "sft", "batch": 32},
        steps=GOOD,
        trainer={"lr": 3e-3, "schedule": "cosine", "warmup_steps": 10},
        checkpoint={"every": POOR, "keep_last": 100},
        rewards=None,
        rollout=None,
        evaluation=None,
    )
    ended = server.run("run", "run.yaml", "--out", "sft", folder=folder)
    assert ended.code == 0, ended.err
    return folder / "sft/checkpoints"


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_policy_comes_close_to_its_teacher(server: Forks, tmp_path: Path, checkpoints: Path) -> None:
    tiny_run(
        tmp_path,
        **COMMON,
        model={"path": str(checkpoints / f"step-{POOR:06d}"), "new": None},
        algorithm={"name": "distill", "teacher": str(checkpoints / f"step-{GOOD:06d}")},
        steps=40,
        trainer={"lr": 5e-4},
        rewards=[{"name": "exact", "after": "#"}],
        rollout={"batch": 32, "group_size": 1, "max_new_tokens": 28},
        evaluation={"taskset": HELD_OUT, "every": 40},
    )
    ended = server.run("run", "run.yaml", "--out", "out", folder=tmp_path)
    assert ended.code == 0, ended.err
    rows = [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["loss/distill"] < 0.5 * rows[1]["loss/distill"]
    assert rows[-1]["eval/sampled"] > rows[0]["eval/sampled"] + 0.05


@pytest.mark.slow
def test_rewards_may_be_left_out(server: Forks, tmp_path: Path) -> None:
    policy, teacher = (toy_checkpoint(tmp_path / f"model-{seed}", "qwen3", seed) for seed in range(2))
    tiny_run(
        tmp_path,
        **COMMON,
        model={"path": str(policy), "new": None},
        algorithm={"name": "distill", "teacher": str(teacher), "divergence": "jsd"},
        steps=3,
        rewards=None,
        rollout={"batch": 4, "group_size": 2, "max_new_tokens": 8},
        evaluation=None,
    )
    ended = server.run("run", "run.yaml", "--out", "out", folder=tmp_path)
    assert ended.code == 0, ended.err
    rows = [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    assert [row["judged"] for row in rows] == [0, 0, 0]
    assert all(row["loss/distill"] > 0 for row in rows)
