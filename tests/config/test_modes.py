"""The key `mode`: what it cannot be together with, and what to do instead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.tiny import tiny_run

from rollmill.config.describe import describe_run
from rollmill.config.loader import load_run
from rollmill.errors import ConfigError

RL: dict[str, Any] = {"stages": None, "steps": 2, "algorithm": {"name": "grpo"}}
LIVE_REQUESTS = {"workflow": "live_requests", "taskset": None, "evaluation": None, "rewards": None}


@pytest.mark.parametrize("mode", ["train", "explore"])
@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"placement": "ray"}, "placement: with mode `MODE` every explorer is a process that you start"),
        ({"rollout": {"reuse": {}}}, "rollout.reuse: drafts belong to checkpoints"),
        (LIVE_REQUESTS, "workflow: an application's sessions come to the process that trains"),
        (
            {"algorithm": {"name": "sft"}, "evaluation": None, "rewards": None, "rollout": None},
            "have nothing to do",
        ),
    ],
)
def test_what_needs_one_process_is_refused(tmp_path: Path, mode: str, changes: dict[str, Any], text: str) -> None:
    path = tiny_run(tmp_path, **RL | changes, mode=mode)
    with pytest.raises(ConfigError) as caught:
        load_run(path)
    assert text.replace("MODE", mode) in str(caught.value)
    assert "mode: both" in str(caught.value) or "use both" in str(caught.value)


def test_buffers_are_free_as_only_the_trainer_has_one(tmp_path: Path) -> None:
    stages = [
        {"name": "one", "steps": 1, "buffer": {"store": "memory"}},
        {"name": "two", "steps": 1, "buffer": {"url": "sqlite:////tmp/other.sqlite"}},
    ]
    loaded = load_run(tiny_run(tmp_path, **RL | {"stages": stages, "steps": None}, mode="train"))
    assert [stage.buffer.store for stage in loaded.stages] == ["memory", "auto"]


def test_all_processes_find_the_same_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever an explorer is started: it reads the run's own file, config.yaml."""
    monkeypatch.chdir(tmp_path)
    loaded = load_run(tiny_run(tmp_path, **RL, mode="train", buffer={"url": "sqlite:///mine.sqlite"}))
    assert loaded.resolved()["buffer"]["url"] == f"sqlite:///{tmp_path}/mine.sqlite"
    for url in ("postgresql://here/runs", "sqlite:////there/mine.sqlite", "sqlite:///:memory:"):
        again = load_run(tiny_run(tmp_path, **RL, mode="train", buffer={"url": url}))
        assert again.resolved()["buffer"]["url"] == url


def test_a_frozen_policy_is_refused(tmp_path: Path) -> None:
    models = {"rival": {"policy": "initial"}}
    workflow = {"name": "reflection"}
    with pytest.raises(ConfigError, match=r"models\.rival\.policy: .*not kept for explorers"):
        load_run(tiny_run(tmp_path, **RL, mode="train", models=models, workflow=workflow))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"mode": "bench"}, "model.path: a new model has learned nothing; give the folder of one to evaluate"),
        ({"mode": "serve"}, "model.path: a new model has learned nothing; give the folder of one to serve"),
        ({"mode": "bench", "evaluation": None}, "mode: mode `bench` needs an `evaluation`"),
        ({"mode": "both", "trainer_away_s": 3}, "trainer_away_s: not honoured by mode `both`"),
        ({"mode": "both", "explorer_silent_s": 3}, "explorer_silent_s: not honoured by mode `both`"),
        (
            {"mode": "serve", **LIVE_REQUESTS, "stages": [{"name": "one"}, {"name": "two"}]},
            "trains on live requests in one stage",
        ),
        ({"mode": "learn"}, "mode"),
    ],
)
def test_other_modes(tmp_path: Path, changes: dict[str, Any], text: str) -> None:
    path = tiny_run(tmp_path, **RL | changes)
    with pytest.raises(ConfigError) as caught:
        load_run(path)
    assert text in str(caught.value)


def test_the_resolved_file_of_either_half_is_a_run_file(tmp_path: Path) -> None:
    for mode in ("train", "explore"):
        loaded = load_run(tiny_run(tmp_path, **RL, mode=mode, trainer_away_s=5.0))
        (tmp_path / "again.yaml").write_text(loaded.to_yaml())
        again = load_run(tmp_path / "again.yaml")
        assert (again.config.mode, again.config.trainer_away_s) == (mode, 5.0)
        assert f"mode {mode}" in describe_run(loaded, {})


SPLIT = {
    "max_staleness": 1,
    "sync_interval": 2,
    "trainer_away_s": 3.0,
    "explorer_silent_s": 4.0,
    "await_trainer": False,
}


@pytest.mark.parametrize("mode", ["train", "explore", "bench", "serve"])
def test_one_file_serves_all_modes(tmp_path: Path, mode: str) -> None:
    path = tiny_run(tmp_path, **RL | SPLIT, model={"path": "somewhere", "new": None})
    loaded = load_run(path, [f"mode={mode}"], require_files=False)
    assert (loaded.config.mode, loaded.stages[0].sync_interval) == (mode, 2)


def test_live_requests_decode_with_the_newest_weights(tmp_path: Path) -> None:
    path = tiny_run(tmp_path, **RL | LIVE_REQUESTS | SPLIT, model={"path": "somewhere", "new": None}, mode="serve")
    with pytest.raises(ConfigError, match="sync_interval: the native engine in the trainer's process decodes"):
        load_run(path, require_files=False)
