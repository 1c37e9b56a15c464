"""Router replay in whole runs: partial rollouts, stores, several turns, resuming; refused where it cannot be."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.tiny import merged, metrics, outcome, tiny_run
from support.toys import toy_checkpoint

from rollmill.errors import ConfigError
from rollmill.launch import resume, run
from rollmill.trackers.run_views import PlainView

STEPS = 4
RL: dict[str, Any] = {
    "model": {"path": "toy", "new": None},
    "stages": None,
    "algorithm": {"name": "grpo", "proximal": "recompute"},
    "rewards": [{"name": "format", "pattern": "(?s).*[ew].*"}],
    "trainer": {"lr": 1e-3, "precision": "bf16", "updates_per_batch": 2},
    "evaluation": None,
    "steps": STEPS,
    "max_staleness": 1,
    "rollout": {"token_budget": 150, "max_new_tokens": 24},
    "checkpoint": {"every": 1, "keep_last": 9},
    "buffer": {"store": "sql"},
}


def started(folder: Path, name: str, architecture: str = "qwen3_moe", **changes: Any) -> Path:
    if not (folder / "toy").exists():
        toy_checkpoint(folder / "toy", architecture, num_hidden_layers=4)
    run(tiny_run(folder, **merged(RL, changes)), out=folder / name, view=PlainView(io.StringIO()))
    return folder / name


def gap(out: Path) -> float:
    """The largest gap of the first two steps, in which both runs have about the same weights."""
    return max(row["logprob_gap/max"] for row in metrics(out)[:2])


def resumed(out: Path, to: Path, *, after: int) -> Path:
    """A copy of a run that was killed behind the checkpoint of a step, and went on."""
    shutil.copytree(out, to)
    (to / "summary.json").unlink()
    for path in (to / "checkpoints").iterdir():
        if int(path.name.rpartition("-")[2]) > after:
            shutil.rmtree(path)
    resume(to, view=PlainView(io.StringIO()))
    return to


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("routing")


@pytest.fixture(scope="module")
def whole(folder: Path) -> Path:
    """Completions in parts, two updates per batch, a buffer in SQLite."""
    return started(folder, "whole")


@pytest.mark.slow
def test_the_gap_of_experts_is_gone_in_a_run_with_partial_rollouts(folder: Path, whole: Path) -> None:
    assert sum(row["rollout/continued"] for row in metrics(whole)) > 0
    off = started(folder, "off", trainer={"router_replay": False})
    assert gap(whole) < 0.3
    assert gap(off) > 2 * gap(whole)


@pytest.mark.parametrize("after", [1, 3])
def test_a_resumed_run_replays_the_same(whole: Path, tmp_path: Path, after: int) -> None:
    assert outcome(resumed(whole, tmp_path / "out", after=after)) == outcome(whole)


@pytest.mark.slow
def test_checkpoints_of_the_store_in_memory_keep_the_routing(folder: Path, whole: Path, tmp_path: Path) -> None:
    memory = started(folder, "memory", buffer={"store": "memory"})
    assert outcome(memory)["weights"] == outcome(whole)["weights"]
    assert outcome(resumed(memory, tmp_path / "out", after=2)) == outcome(memory)


def test_rollout_files_do_not_show_it(whole: Path) -> None:
    rows = [json.loads(line) for file in (whole / "rollouts").glob("*.jsonl") for line in file.open()]
    assert rows
    assert not any("routing" in row for row in rows)


def test_a_dense_model_is_refused_where_it_is_asked_for(tmp_path: Path) -> None:
    started(tmp_path, "auto", "qwen3", steps=1)
    with pytest.raises(ConfigError, match=r"trainer.router_replay: Qwen3ForCausalLM has no routers.*remove this key"):
        started(tmp_path, "out", "qwen3", trainer={"router_replay": True})
