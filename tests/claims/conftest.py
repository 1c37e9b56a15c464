"""A policy that imitation has taught wrongly, for claims about what repairs it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.forks import Forks
from support.tiny import tiny_run

_ROWS = "rollmill.quickstart.addition:rows"
_TASKS = {"function": _ROWS, "options": {"size": 2000, "seed": 1, "digits": 2, "forget": 0.65}}
_HELD_OUT = {"function": _ROWS, "options": {"size": 100, "seed": 2, "digits": 2}}
_MODEL = {
    "hidden_size": 96,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "intermediate_size": 256,
    "initializer_range": 0.06,
}
_COMMON: dict[str, Any] = {"taskset": _TASKS, "stages": None, "checkpoint": {"every": 1000}}
REPAIR_STEPS = 30


@pytest.fixture(scope="session")
def imitator(server: Forks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that learned addition from a teacher who forgets most carries."""
    folder = tmp_path_factory.mktemp("imitator")
    tiny_run(
        folder,
        **_COMMON,
        model={"new": _MODEL},
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


@pytest.fixture
def repair(imitator: Path) -> dict[str, Any]:
    """The run file of its repair by rewards, as changes of the tiny one."""
    return {
        **_COMMON,
        "model": {"path": str(imitator), "new": None},
        "algorithm": {"name": "grpo"},
        "steps": REPAIR_STEPS,
        "rewards": [{"name": "exact", "after": "#"}],
        "trainer": {"lr": 1e-4},
        "rollout": {"batch": 16, "group_size": 8, "max_new_tokens": 28},
        "evaluation": {"taskset": _HELD_OUT, "every": REPAIR_STEPS},
    }
