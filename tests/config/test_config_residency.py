"""The section `residency`: its short forms, and keys that mean nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny import tiny_run

from rollmill.config.loader import load_run
from rollmill.config.offload import OffloadConfig
from rollmill.errors import ConfigError

RL: dict[str, Any] = {"stages": None, "steps": 2}


def loaded(folder: Path, **changes: Any) -> OffloadConfig | None:
    return load_run(tiny_run(folder, **RL | changes)).stages[0].residency


def test_short_forms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert loaded(tmp_path) is None
    assert loaded(tmp_path, residency="none") is None
    assert loaded(tmp_path, residency="auto") == OffloadConfig()
    found = loaded(tmp_path, residency={"optimizer": "disk", "budget_gb": 2, "folder": "moved"})
    assert found == OffloadConfig(optimizer="disk", budget_gb=2, folder=tmp_path / "moved")


def test_a_resolved_run_is_a_run_file_again(tmp_path: Path) -> None:
    run = load_run(tiny_run(tmp_path, residency={"cache": "destroyed"}))
    (tmp_path / "again.yaml").write_text(run.to_yaml())
    again = load_run(tmp_path / "again.yaml")
    assert again.stages == run.stages
    assert all(stage.residency is not None and stage.residency.cache == "destroyed" for stage in again.stages)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"residency": {"critic": "disk"}}, "residency.critic: not honoured: the stage has no critic"),
        ({"residency": {"reference": "disk"}}, "residency.reference: not honoured: the stage has no reference"),
        ({"residency": {"teacher": "disk"}}, "residency.teacher: not honoured: the stage has no teacher"),
        ({"residency": {"rewards": "disk"}}, "residency.rewards: not honoured: the stage has no rewards"),
        ({"residency": {"optimizer": "destroyed"}}, "residency.optimizer: expected"),
        ({"residency": {"cache": "disk"}}, "residency.cache: expected"),
        ({"residency": {"cast": "destroyed"}}, "residency.cast: in fp32 rollouts run on the policy's own weights"),
        ({"residency": {"policy": "disk"}}, "residency.policy: in fp32 rollouts need the policy's own weights"),
        (
            {
                "residency": {"reference": "disk"},
                "model": {"path": ".", "new": None, "lora": {}},
                "algorithm": {"name": "grpo", "kl": 0.1},
            },
            "residency.reference: with model.lora the reference is a copy of the adapters",
        ),
        ({"residency": {"engine": "destroyed"}}, "residency.engine: not honoured: the stage has no engine"),
        (
            {"residency": {"cache": "destroyed"}, "engine": "vllm"},
            "residency.cache: not honoured: the stage has no cache",
        ),
        (
            {"residency": "auto", "engine": {"name": "vllm", "sleep": True}},
            "engine.sleep: with `residency` that decides (residency.engine); remove this",
        ),
        ({"residency": {"budget_gb": 0}}, "residency.budget_gb"),
        ({"residency": "some"}, "residency"),
        (
            {
                "residency": "auto",
                "algorithm": {"name": "sft"},
                "evaluation": None,
                "rewards": None,
                "rollout": None,
            },
            "residency: not honoured: algorithm `sft` without an evaluation needs all that it has; remove it",
        ),
        (
            {
                "residency": "auto",
                "algorithm": {"name": "reward_model"},
                "evaluation": None,
                "rewards": None,
                "rollout": None,
                "taskset": {"fields": {"rejected": "answer"}},
            },
            "residency: not honoured by algorithm `reward_model`",
        ),
    ],
)
def test_what_is_not_honoured_is_an_error(tmp_path: Path, changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        loaded(tmp_path, **changes)
    assert text in str(caught.value)
