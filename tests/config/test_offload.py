"""The section `offload`: its short forms, and keys that mean nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.tiny import tiny_run

from rollmill.config.checks.offload import engines_on_device, explorers_on_device
from rollmill.config.loader import load_run
from rollmill.config.offload import OffloadConfig
from rollmill.errors import ConfigError

RL: dict[str, Any] = {"stages": None, "steps": 2}
SPLIT: dict[str, Any] = {"mode": "train"}


def loaded(folder: Path, **changes: Any) -> OffloadConfig | None:
    return load_run(tiny_run(folder, **RL | changes)).stages[0].offload


def test_short_forms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert loaded(tmp_path) is None
    assert loaded(tmp_path, offload="none") is None
    assert loaded(tmp_path, offload="auto") == OffloadConfig()
    found = loaded(tmp_path, offload={"optimizer": "disk", "budget_gb": 2, "folder": "moved"})
    assert found == OffloadConfig(optimizer="disk", budget_gb=2, folder=tmp_path / "moved")


def test_a_resolved_run_is_a_run_file_again(tmp_path: Path) -> None:
    run = load_run(tiny_run(tmp_path, offload={"cache": "destroyed"}))
    (tmp_path / "again.yaml").write_text(run.to_yaml())
    again = load_run(tmp_path / "again.yaml")
    assert again.stages == run.stages
    assert all(stage.offload is not None and stage.offload.cache == "destroyed" for stage in again.stages)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"offload": {"critic": "disk"}}, "offload.critic: not honoured: the stage has no critic"),
        ({"offload": {"reference": "disk"}}, "offload.reference: not honoured: the stage has no reference"),
        ({"offload": {"teacher": "disk"}}, "offload.teacher: not honoured: the stage has no teacher"),
        ({"offload": {"rewards": "disk"}}, "offload.rewards: not honoured: the stage has no rewards"),
        ({"offload": {"optimizer": "destroyed"}}, "offload.optimizer: expected"),
        ({"offload": {"cache": "disk"}}, "offload.cache: expected"),
        ({"offload": {"engine": "destroyed"}}, "offload.engine: not honoured: the stage has no engine"),
        ({"offload": {"shared_by": 2}}, "offload.shared_by: not honoured without explorers in other processes"),
        (SPLIT | {"offload": {"cache": "destroyed"}}, "offload.cache: not honoured: explorers in other processes"),
        (
            SPLIT | {"offload": {"engine": "destroyed"}, "max_staleness": 2},
            "offload.engine: explorers roll out while the trainer works (max_staleness 2)",
        ),
        ({"offload": {"cast": "destroyed"}}, "offload.cast: rollouts run on the policy's own weights"),
        ({"offload": {"policy": "disk"}}, "offload.policy: rollouts need the policy's own weights"),
        (
            {
                "offload": {"reference": "disk"},
                "model": {"path": ".", "new": None, "lora": {}},
                "algorithm": {"name": "grpo", "kl": 0.1},
            },
            "offload.reference: with model.lora the reference is a copy of the adapters",
        ),
        (
            {"offload": {"cache": "destroyed"}, "engine": "vllm"},
            "offload.cache: not honoured: the stage has no cache",
        ),
        (
            {"offload": "auto", "engine": {"name": "vllm", "sleep": True}},
            "engine.sleep: with `offload` that decides (offload.engine); remove this",
        ),
        ({"offload": {"budget_gb": 0}}, "offload.budget_gb"),
        ({"offload": "some"}, "offload"),
        (
            {
                "offload": "auto",
                "algorithm": {"name": "sft"},
                "evaluation": None,
                "rewards": None,
                "rollout": None,
            },
            "offload: not honoured: algorithm `sft` without an evaluation needs all that it has; remove it",
        ),
        (
            {
                "offload": "auto",
                "algorithm": {"name": "reward_model"},
                "evaluation": None,
                "rewards": None,
                "rollout": None,
                "taskset": {"fields": {"rejected": "answer"}},
            },
            "offload: not honoured by algorithm `reward_model`",
        ),
    ],
)
def test_what_is_not_honoured_is_an_error(tmp_path: Path, changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        loaded(tmp_path, **changes)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "engines"),
    [
        ({"mode": "train"}, ["native"]),
        ({"placement": {"name": "ray", "explorers": 3}}, ["native"] * 3),
        ({"placement": {"name": "ray", "explorers": [{"count": 2, "gpus": 1}, {"engine": "vllm"}]}}, ["vllm"]),
        ({"placement": {"name": "ray", "explorers": 2}, "offload": {"shared_by": 3}}, ["native"] * 3),
        ({"placement": {"name": "ray", "explorers": 2}, "offload": {"shared_by": 0}}, []),
        ({"placement": {"name": "ray", "explorers": 2, "gpus": 1}, "offload": {"shared_by": 1}}, ["native"]),
    ],
)
def test_explorers_on_the_trainers_device_are_known(
    tmp_path: Path, changes: dict[str, Any], engines: list[str]
) -> None:
    run = load_run(tiny_run(tmp_path, **RL | {"offload": "auto"} | changes))
    found = engines_on_device(run.config)
    assert found is not None
    assert [each.engine.name for each in explorers_on_device(run.stages[0], found)] == engines
