"""Runs of a policy that sees: SFT and GRPO on pictures, resume, evaluation, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from picture_models import picture_checkpoint, picture_rows, picture_run
from safetensors.torch import load_file
from toys import toy_checkpoint
from transformers import AutoModelForImageTextToText

import rollmill
from rollmill.cli import main
from rollmill.config.loader import load_run
from rollmill.config.model import ModelConfig
from rollmill.config.taskset import TasksetConfig
from rollmill.data import encode_pictures, load_taskset, render_prompt
from rollmill.errors import ConfigError, ModelError, TasksetError
from rollmill.launch import resume
from rollmill.models.load import PolicyModel, load_policy
from rollmill.models.vision import read_processor
from rollmill.orchestrator.setup import set_up_run

BASE: dict[str, Any] = {
    "rewards": [{"name": "format", "pattern": "[0-9]"}],
    "rollout": {"batch": 2, "group_size": 4, "max_new_tokens": 4},
}


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
        ({"trainer": {"ranks": 2, "sharding": "tensor"}}, "trainer.sharding: tensor"),
        ({"models": {"judge": {"policy": "initial"}}, "workflow": "reflection"}, "models"),
        ({"algorithm": {"name": "reward_model"}, "rewards": None, "rollout": None}, "algorithm: reward_model"),
        ({"model": {"lora": {}}, "trainer": {"freeze": []}}, "trainer.freeze"),
    ],
)
def test_check_refuses_what_does_not_see_yet(
    change: dict[str, Any], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = picture_run(tmp_path, stages=None, **BASE)
    run = yaml.safe_load(path.read_text())
    model = run["model"] | change.get("model", {})
    run = {key: value for key, value in (run | change).items() if value is not None} | {"model": model}
    path.write_text(yaml.safe_dump(run))
    assert main(["check", str(path)]) == 2
    assert named in capsys.readouterr().err


def test_other_uses_of_a_model_that_sees_are_refused(seeing: Any) -> None:
    _, folder = seeing
    with pytest.raises(ModelError, match="only the policy"):  # judges, other models, serve
        load_policy(ModelConfig(path=folder / "model"), texts=[], seed=0, device=torch.device("cpu"))


def test_a_text_model_is_refused_picture_tasks_unless_they_are_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture_rows(tmp_path / "data")
    toy_checkpoint(tmp_path / "toy", "qwen3")
    run = BASE | {"model": {"path": str(tmp_path / "toy")}}
    path = tmp_path / "run.yaml"
    rows = {"path": str(tmp_path / "data/rows.jsonl")}
    path.write_text(yaml.safe_dump(run | {"taskset": rows}))
    with pytest.raises(ConfigError, match="images: text"):
        set_up_run(load_run(path), tmp_path, None)
    assert main(["check", str(path)]) == 2
    assert "images: text" in capsys.readouterr().err
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
    plain = load_taskset(TasksetConfig(path=rows, chat=False, on_bad_row="skip")).tasks
    with pytest.raises(TasksetError, match=r"taskset\.chat: true"):
        encode_pictures(plain[0], policy.tokenizer)


def test_pictures_stand_where_the_messages_show_them(seeing: Any, tmp_path: Path) -> None:
    policy, _ = seeing
    rows = picture_rows(tmp_path / "data")
    shown = [{"type": "image"}, {"type": "text", "text": "one"}, {"type": "image"}, {"type": "text", "text": "two"}]
    chat = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": shown},
    ]
    rows.write_text(json.dumps({"prompt": chat, "images": ["1.png", "2.png"]}) + "\n")
    [task] = load_taskset(TasksetConfig(path=rows)).tasks
    assert render_prompt(task, policy.tokenizer) == "u:hia:yesu:<image>one<image>twoa:"
    pictures = encode_pictures(task, policy.tokenizer)
    token = policy.model.picture_processor.image_token_id
    assert pictures.token_ids.count(token) == 2 * 16  # 28 x 28 pixels in patches of 7
    assert pictures.inputs["pixel_values"].shape[0] == 2
    swapped = json.dumps({"prompt": chat, "images": ["2.png", "1.png"]})
    rows.write_text(swapped + "\n")
    other = encode_pictures(load_taskset(TasksetConfig(path=rows)).tasks[0], policy.tokenizer)
    assert torch.equal(other.inputs["pixel_values"].flip(0), pictures.inputs["pixel_values"])


def test_pixels_have_limits(tmp_path: Path) -> None:
    rows = picture_rows(tmp_path / "data")  # the first picture has 28 x 28 pixels
    config = ModelConfig(path=picture_checkpoint(tmp_path / "model", "qwen2_vl"))
    policy = load_policy(config, texts=[], seed=0, device=torch.device("cpu"), pictures=True)
    grids = {}
    for name, limits in (("plain", {}), ("more", {"min_pixels": 56 * 56}), ("fewer", {"max_pixels": 14 * 14})):
        [task, *_] = load_taskset(TasksetConfig(path=rows, chat=True, **limits)).tasks
        pictures = encode_pictures(task, policy.tokenizer)
        grids[name] = pictures.inputs["image_grid_thw"][0].tolist()
    assert grids == {"plain": [1, 2, 2], "more": [1, 4, 4], "fewer": [1, 2, 2]}  # the processor has a least, too
    with pytest.raises(ValueError, match="min_pixels is 9, more than max_pixels"):
        TasksetConfig(path=rows, min_pixels=9, max_pixels=4)
