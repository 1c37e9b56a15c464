"""Every algorithm through the whole loop: rollouts, rewards, demonstrations or pairs, updates, checkpoint, resume."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from tiny import outcome, tiny_run

from rollmill.master import resume, run
from rollmill.monitor import load_experiences, read_metrics
from rollmill.monitor.view import PlainView
from rollmill.recipes import known_algorithms

FAST = {
    "grpo",
    "remax",
    "ppo",
    "kimi",
    "gdpo",
    "chord",
    "dpo",
}  # each with state or data of its own; the others are slow
NAMES = [
    name if name in FAST else pytest.param(name, marks=pytest.mark.slow)
    for name in known_algorithms()
    if name not in ("distill", "reward_model")  # these need a second model
]
PAIRS = [{"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": str(a + b + 1)} for a in range(5) for b in range(5)]
EXTRA: dict[str, dict[str, Any]] = {
    "kimi": {"trainer": {"updates_per_batch": 2}},
    "ppo": {"algorithm": {"kl": {"coefficient": 0.1, "estimator": "k1", "where": "reward", "target": 0.01}}},
    "grpo": {"algorithm": {"kl": {"coefficient": 0.1, "refresh_every": 2}, "corrections": ["tis"]}, "max_staleness": 1},
    "dapo": {"algorithm": {"overlong_buffer": 4}},
}


def start(folder: Path, name: str, steps: int, **changes: Any) -> dict[str, Any]:
    """A run of the algorithm and nothing else."""
    own = dict(EXTRA.get(name, {}))
    own["algorithm"] = {"name": name, **own.get("algorithm", {})}
    own["trainer"] = {"lr": 1e-3, **own.get("trainer", {})}
    if not known_algorithms()[name].uses_rollouts:
        own |= {"rollout": None, "rewards": None}
    if known_algorithms()[name].uses_pairs:
        (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in PAIRS))
        own["taskset"] = {"path": str(folder / "pairs.jsonl"), "function": None, "options": None}
    path = tiny_run(folder, stages=None, evaluation=None, steps=steps, **(own | changes))
    return run(path, out=folder / f"out-{steps}", view=PlainView(io.StringIO()))


@pytest.mark.parametrize("name", NAMES)
def test_a_run_makes_its_steps_and_resumes_exactly(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    summary = start(tmp_path, name, 4)
    assert summary["status"] == "done"
    whole = outcome(tmp_path / "out-4")
    rows = read_metrics(tmp_path / "out-4")
    assert len(rows) == 4
    assert any(row["grad_norm"] > 0 for row in rows)
    cut = tmp_path / "out-cut"
    (tmp_path / "out-4").rename(cut)
    for folder in (cut / "checkpoints").glob("step-*"):
        if int(folder.name[5:]) > 2:
            for file in folder.iterdir():
                file.unlink()
            folder.rmdir()
    assert resume(cut, view=PlainView(io.StringIO()))["status"] == "done"
    assert outcome(cut) == whole


def test_remax_rolls_one_greedy_completion_per_task(tmp_path: Path) -> None:
    start(tmp_path, "remax", 1, rollout={"batch": 3, "group_size": 2})
    step = list(load_experiences(tmp_path / "out-1"))
    groups: dict[str, set[float]] = {}
    for experience in step:
        groups.setdefault(experience.group, set()).add(experience.info["greedy_reward"])
    assert len(step) == 6
    assert all(len(baselines) == 1 for baselines in groups.values())
