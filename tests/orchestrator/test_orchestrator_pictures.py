"""Runs of a policy that sees: SFT and GRPO on pictures, resume, evaluation, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from picture_models import picture_checkpoint
from PIL import Image
from safetensors.torch import load_file
from toys import toy_checkpoint
from transformers import AutoModelForImageTextToText

import rollmill
from rollmill.config.loader import load_run
from rollmill.config.model import LoRAConfig, ModelConfig
from rollmill.config.taskset import TasksetConfig
from rollmill.data import encode_pictures, load_taskset
from rollmill.errors import ConfigError, ModelError, TasksetError
from rollmill.launch import resume
from rollmill.models.load import PolicyModel, load_policy
from rollmill.models.vision import read_processor
from rollmill.orchestrator.picture_support import require_picture_support
from rollmill.orchestrator.setup import set_up_run

BASE: dict[str, Any] = {
    "rewards": [{"name": "format", "pattern": "[0-9]"}],
    "rollout": {"batch": 2, "group_size": 4, "max_new_tokens": 4},
}
COLOURS = [(255, 0, 0), (0, 255, 0), (0, 0, 255), (250, 250, 250)]


def picture_rows(folder: Path, count: int = 8) -> Path:
    """Rows with pictures of one colour and of different sizes; their answer is the number of the colour."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for i in range(count):
        name = f"{i}.png"
        Image.new("RGB", (28 + 14 * (i % 3), 28), COLOURS[i % 4]).save(folder / name)
        row = {"prompt": f"q{i}", "answer": str(i % 4), "response": str(i % 4), "images": [name] * (1 + i % 2)}
        lines.append(json.dumps(row))
    (folder / "rows.jsonl").write_text("\n".join(lines) + "\n")
    return folder / "rows.jsonl"


def picture_run(folder: Path, family: str = "qwen2_vl", **changes: Any) -> Path:
    """Write a run file of two stages that trains a tiny policy on pictures."""
    rows = picture_rows(folder / "data")
    run: dict[str, Any] = {
        "name": "see",
        "model": {"path": str(picture_checkpoint(folder / "model", family))},
        "taskset": {"path": str(rows), "chat": True},
        "rewards": [{"name": "format", "pattern": "[0-9]"}],
        "rollout": {"batch": 2, "group_size": 4, "max_new_tokens": 4},
        "trainer": {"lr": 1e-3},
        "checkpoint": {"every": 1, "keep_last": 9},
        "stages": [
            {"name": "warm", "algorithm": {"name": "sft", "batch": 4}, "steps": 2},
            {"name": "see", "algorithm": {"name": "grpo", "kl": {"coefficient": 0.01}}, "steps": 2},
        ],
    }
    run |= changes
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(run))
    return path


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> tuple[PolicyModel, Path]:
    """A policy that sees, and the folder with its checkpoint and rows of pictures."""
    folder = tmp_path_factory.mktemp("seeing")
    picture_rows(folder / "data")
    config = ModelConfig(path=picture_checkpoint(folder / "model", "llava"))
    return load_policy(config, texts=[], seed=0, device=torch.device("cpu"), pictures=True), folder


def weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    return load_file(checkpoint / "model.safetensors")


@pytest.mark.slow
def test_sft_and_grpo_train_a_policy_that_sees(tmp_path: Path) -> None:
    held_out = {"taskset": {"path": str(tmp_path / "data/rows.jsonl"), "chat": True}, "every": 2}
    rollmill.run(picture_run(tmp_path, evaluation=held_out), out=tmp_path / "out")
    lines = [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    gaps = [line["logprob_gap/max"] for line in lines if "logprob_gap/max" in line]
    assert gaps
    assert max(gaps) < 1e-4
    assert any("eval/sampled" in line or "eval/greedy" in line for line in lines)
    before, after = weights(tmp_path / "model"), weights(tmp_path / "out/checkpoints/step-000004")
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert any("language_model" in name or name.startswith("model.layers") for name in moved)
    tower = {name for name in before if "visual" in name and "merger" not in name}
    assert tower
    assert not tower & moved  # frozen by default
    assert any("merger" in name for name in moved)  # the projector is trained
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path / "out/checkpoints/step-000004")
    processor = read_processor(tmp_path / "out/checkpoints/step-000004", {}, loaded.config.image_token_id)
    assert processor.image_token == "<|image_pad|>"


@pytest.mark.slow
def test_an_interrupted_run_resumes_bit_equal(tmp_path: Path) -> None:
    path = picture_run(tmp_path)
    rollmill.run(path, out=tmp_path / "whole")
    rollmill.run(path, out=tmp_path / "parts")
    for step in (2, 3, 4):  # as if it had been killed after its first step
        (tmp_path / f"parts/checkpoints/step-{step:06d}").rename(tmp_path / f"gone-{step}")
    resume(tmp_path / "parts")
    whole, parts = (weights(tmp_path / name / "checkpoints/step-000004") for name in ("whole", "parts"))
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"engine": "vllm"}, "engine: vllm"),
        ({"trainer": {"precision": "bf16"}}, "trainer.precision: bf16"),
        ({"trainer": {"ranks": 2}}, "trainer.ranks"),
        ({"residency": "auto"}, "residency"),
        ({"max_staleness": 1}, "max_staleness"),
        ({"rollout": {"reuse": {}}}, "rollout.reuse"),
        ({"rollout": {"ngram_draft": {}}}, "rollout.reuse"),
        ({"rollout": {"token_budget": 50}, "max_staleness": 0}, "rollout.token_budget"),
        ({"rollout": {"oversample": 0.5}}, "rollout.token_budget"),
        ({"buffer": {"replay": {"groups": 1}}}, "buffer.replay"),
        ({"workflow": "reflection"}, "workflow"),
        ({"models": {"judge": {"policy": "initial"}}, "workflow": "reflection"}, "workflow"),
        ({"algorithm": {"name": "ppo"}}, "algorithm: ppo"),
        ({"algorithm": {"name": "dpo"}, "rewards": None, "rollout": None}, "algorithm: dpo"),
        ({"mode": "train"}, "mode"),
        ({"placement": "ray"}, "placement"),
    ],
)
def test_what_does_not_see_yet_is_refused(change: dict[str, Any], named: str, seeing: Any, tmp_path: Path) -> None:
    policy, folder = seeing
    run = {key: value for key, value in (BASE | change).items() if value is not None}
    run |= {
        "model": {"path": str(folder / "model")},
        "taskset": {"path": str(folder / "data/rows.jsonl"), "chat": True},
    }
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(run))
    with pytest.raises(ConfigError, match=named):
        require_picture_support(load_run(path), policy)


def test_lora_and_other_uses_of_a_model_that_sees_are_refused(seeing: Any) -> None:
    _, folder = seeing
    cpu = torch.device("cpu")
    with pytest.raises(ModelError, match=r"model\.lora"):
        load_policy(ModelConfig(path=folder / "model", lora=LoRAConfig()), texts=[], seed=0, device=cpu, pictures=True)
    with pytest.raises(ModelError, match="only the policy"):  # judges, other models, serve, eval
        load_policy(ModelConfig(path=folder / "model"), texts=[], seed=0, device=cpu)


def test_a_text_model_is_refused_picture_tasks_unless_they_are_text(tmp_path: Path) -> None:
    picture_rows(tmp_path / "data")
    toy_checkpoint(tmp_path / "toy", "qwen3")
    run = BASE | {"model": {"path": str(tmp_path / "toy")}}
    path = tmp_path / "run.yaml"
    rows = {"path": str(tmp_path / "data/rows.jsonl")}
    path.write_text(yaml.safe_dump(run | {"taskset": rows}))
    with pytest.raises(ConfigError, match="images: text"):
        set_up_run(load_run(path), tmp_path, None)
    path.write_text(yaml.safe_dump(run | {"taskset": rows | {"images": "text"}}))
    assert len(set_up_run(load_run(path), tmp_path, None).tasks[0].training.tasks) == 8


def test_a_wrong_picture_names_its_task(seeing: Any, tmp_path: Path) -> None:
    policy, _ = seeing
    rows = picture_rows(tmp_path / "data")
    tasks = load_taskset(TasksetConfig(path=rows, chat=True)).tasks
    encode_pictures(tasks[0], policy.tokenizer)
    (tmp_path / "data/1.png").write_bytes(b"no picture")
    with pytest.raises(TasksetError, match=f"task {tasks[1].id}: the image .* has changed"):
        encode_pictures(tasks[1], policy.tokenizer)
    plain = load_taskset(TasksetConfig(path=rows.with_name("rows.jsonl"), chat=False, on_bad_row="skip")).tasks
    with pytest.raises(TasksetError, match=r"taskset\.chat: true"):
        encode_pictures(plain[0], policy.tokenizer)
