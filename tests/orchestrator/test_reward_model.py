"""Runs that train a reward model: what their checkpoints hold, resume, and what the run file may not say."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from support.tiny import SFT, tiny_run
from support.toys import toy_checkpoint
from transformers import AutoModelForSequenceClassification, CohereConfig, CohereForCausalLM

from rollmill.errors import ModelError
from rollmill.launch import resume, run
from rollmill.models import classifier
from rollmill.trackers import read_metrics
from rollmill.trackers.run_views import PlainView

TASKS = {"function": "rollmill.quickstart.addition:rows", "options": {"size": 40}, "fields": {"rejected": "answer"}}
RUN: dict[str, Any] = {
    "stages": None,
    "rollout": None,
    "rewards": None,
    "evaluation": None,
    "taskset": TASKS,
    "algorithm": {"name": "reward_model", "batch": 8},
    "steps": 5,
    "trainer": {"lr": 3e-3},
}
HEAD = "reward_model/model.safetensors"


def started(folder: Path, **changes: Any) -> dict[str, Any]:
    return run(tiny_run(folder, **(RUN | changes)), out=folder / "out", view=PlainView(io.StringIO()))


def timeless(folder: Path) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if "second" not in key} for row in read_metrics(folder / "out")]


def test_every_checkpoint_holds_a_reward_model_and_the_policy_stays(tmp_path: Path) -> None:
    started(tmp_path, checkpoint={"every": 2, "keep_last": 3})
    steps = sorted((tmp_path / "out/checkpoints").iterdir())
    assert [path.name for path in steps] == ["step-000002", "step-000004", "step-000005"]
    assert len({(path / HEAD).read_bytes() for path in steps}) == 3
    assert len({(path / "model.safetensors").read_bytes() for path in steps}) == 1
    loaded, info = AutoModelForSequenceClassification.from_pretrained(
        steps[-1] / "reward_model", output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert loaded.config.num_labels == 1
    rows = read_metrics(tmp_path / "out")
    assert rows[-1]["pairs/accuracy"] > rows[0]["pairs/accuracy"] == 0.5


def test_resume_gives_the_same_reward_model(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    changes: dict[str, Any] = {"checkpoint": {"every": 2, "keep_last": 9}}
    started(tmp_path / "a", **changes)
    started(tmp_path / "b", **changes)
    for name in ("step-000004", "step-000005"):
        folder = tmp_path / "b/out/checkpoints" / name
        folder.rename(tmp_path / "b" / name)
    resume(tmp_path / "b/out", PlainView(io.StringIO()))
    assert timeless(tmp_path / "a") == timeless(tmp_path / "b")
    last = "out/checkpoints/step-000005"
    assert (tmp_path / "a" / last / HEAD).read_bytes() == (tmp_path / "b" / last / HEAD).read_bytes()


def test_a_reward_model_after_imitation_starts_from_the_imitator(tmp_path: Path) -> None:
    stages = [SFT | {"steps": 2}, {"name": "rank", "algorithm": {"name": "reward_model", "batch": 4}, "steps": 2}]
    started(tmp_path, stages=stages, algorithm=None, steps=None, checkpoint={"keep_last": 2})
    first, last = sorted((tmp_path / "out/checkpoints").iterdir())
    assert not (first / "reward_model").exists()
    assert (last / HEAD).is_file()
    assert (first / "model.safetensors").read_bytes() == (last / "model.safetensors").read_bytes()


def test_stages_share_one_reward_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "first").mkdir()
    started(tmp_path / "first")
    loads: list[Path] = []
    read = classifier.load_classifier
    monkeypatch.setattr(classifier, "load_classifier", lambda path, device: loads.append(path) or read(path, device))
    reward = {"name": "model", "path": str(tmp_path / "first/out/checkpoints/step-000005/reward_model")}
    stages = [{"name": name, "algorithm": {"name": "grpo"}, "steps": 1} for name in ("one", "two")]
    use = tiny_run(tmp_path, rewards=[reward], evaluation=None, stages=stages)
    run(use, out=tmp_path / "use", view=PlainView(io.StringIO()))
    assert len(loads) == 1
    rows = read_metrics(tmp_path / "use")
    assert all(row["reward/model"] == row["reward/mean"] and row["judged"] == 16 for row in rows)
    experience = json.loads((tmp_path / "use/rollouts/step-000001.jsonl").read_text().splitlines()[0])
    assert experience["reward_parts"] == {"model": experience["reward"]}


def test_an_architecture_without_a_classifier_ends_the_run_at_its_start(tmp_path: Path) -> None:
    folder = toy_checkpoint(tmp_path / "model", "llama")
    sizes: dict[str, Any] = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 300}
    config = CohereConfig(**sizes, intermediate_size=16, bos_token_id=1, eos_token_id=1)
    CohereForCausalLM(config).save_pretrained(folder)
    with pytest.raises(ModelError, match="no sequence classifier for CohereForCausalLM"):
        started(tmp_path, model={"path": str(folder), "new": None})
    assert not (tmp_path / "out/metrics.jsonl").exists()


def test_a_wrong_folder_ends_the_run_at_its_start(tmp_path: Path) -> None:
    folder = toy_checkpoint(tmp_path / "model", "llama")
    with pytest.raises(ModelError, match="LlamaForCausalLM, not a sequence classifier"):
        run(tiny_run(tmp_path, rewards=[{"name": "model", "path": str(folder)}]), out=tmp_path / "out")
