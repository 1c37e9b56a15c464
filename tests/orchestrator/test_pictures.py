"""Runs of a vision-language policy: SFT and GRPO on pictures, resume, evaluation, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from support.picture_models import picture_checkpoint, picture_rows, picture_run
from support.toys import toy_checkpoint
from transformers import AutoModelForImageTextToText

import rollmill
from rollmill.cli import main
from rollmill.config.loader import load_run
from rollmill.config.model import ModelConfig
from rollmill.config.taskset import TasksetConfig
from rollmill.data import encode_pictures, encode_prompt, load_taskset, render_prompt
from rollmill.data.images import image_refs_of
from rollmill.data.picture_prompts import read_processor
from rollmill.data.picture_turns import refer_to
from rollmill.errors import ConfigError, EngineError, ModelError, TasksetError
from rollmill.launch import resume
from rollmill.models.load import PolicyModel, load_policy
from rollmill.orchestrator.setup import set_up_run
from rollmill.rollout.chat import ChatRenderer, RecordedReply
from rollmill.types import Task

BASE: dict[str, Any] = {
    "rewards": [{"name": "format", "pattern": "[0-9]"}],
    "rollout": {"batch": 2, "group_size": 4, "max_new_tokens": 4},
}


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> tuple[PolicyModel, Path]:
    """A vision-language policy, and the folder with its checkpoint and rows of pictures."""
    folder = tmp_path_factory.mktemp("seeing")
    picture_rows(folder / "data")
    config = ModelConfig(path=picture_checkpoint(folder / "model", "llava"))
    return load_policy(config, texts=[], seed=0, device=torch.device("cpu"), pictures=True), folder


def weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    return load_file(checkpoint / "model.safetensors")


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("family", ["gemma3", "paligemma"])
def test_sft_and_grpo_train_a_policy_whose_pictures_attend_in_both_directions(family: str, tmp_path: Path) -> None:
    changes = {"trainer": {"lr": 1e-3, "ranks": 2, "micro_batch_tokens": 64}}
    rollmill.run(picture_run(tmp_path, family, **changes), out=tmp_path / "out")
    lines = [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    gaps = [line["logprob_gap/max"] for line in lines if "logprob_gap/max" in line]
    assert gaps
    assert max(gaps) < 1e-4


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


@pytest.mark.parametrize(
    ("family", "change", "named"),
    [
        ("gemma3", {"engine": "vllm"}, "engine: vllm does not work with Gemma3ForConditionalGeneration"),
        ("paligemma", {"engine": "vllm"}, "engine: vllm .*: vLLM attends in both directions within pictures only"),
        (
            "paligemma",
            {"workflow": "tools", "tools": ["calculator"]},
            "workflow: tools .*: use `single_turn`: its prompt attends in both",
        ),
        ("paligemma", {"taskset": {"fields": {"workflow": "how"}}}, "taskset.fields.workflow does not work"),
        (
            "paligemma",
            {"taskset": {"path": "text.jsonl"}},
            "task .* has no picture, and the model's processor takes no",
        ),
    ],
)
def test_check_refuses_what_does_not_go_with_attention_in_both_directions(
    family: str, change: dict[str, Any], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = picture_run(tmp_path, family, stages=None, **BASE)
    (tmp_path / "text.jsonl").write_text('{"prompt": "how many?"}\n')
    run = yaml.safe_load(path.read_text())
    taskset = run["taskset"] | change.pop("taskset", {})
    path.write_text(yaml.safe_dump(run | change | {"taskset": taskset}))
    assert main(["check", str(path)]) == 2
    assert re.search(named, capsys.readouterr().err)


def test_a_policy_that_answers_one_prompt_is_given_nothing_else(tmp_path: Path) -> None:
    config = ModelConfig(path=picture_checkpoint(tmp_path / "model", "paligemma"))
    policy = load_policy(config, texts=[], seed=0, device=torch.device("cpu"), pictures=True)
    rows = picture_rows(tmp_path / "data")
    [task, *_] = load_taskset(TasksetConfig(path=rows)).tasks
    assert render_prompt(task, policy.tokenizer) == "<image>q0"
    assert encode_pictures(task, policy.tokenizer).blocks == [(0, 16 + len("<bos>q0\n") - 4, False)]
    placed = Task("1", "what is <image>?", metadata=task.metadata)
    assert render_prompt(placed, policy.tokenizer) == "what is <image>?"
    with pytest.raises(TasksetError, match="task 2 has no picture"):
        encode_prompt(Task("2", "what?"), policy.tokenizer)
    policy.tokenizer.chat_template = policy.tokenizer.picture_processor.processor.chat_template = (
        "{% for m in messages %}{% for p in m.content %}{% if p.type == 'image' %}<image>{% else %}{{ p.text }}"
        "{% endif %}{% endfor %}{% endfor %}"
    )
    chat = ChatRenderer(policy.tokenizer, frozenset())
    picture = refer_to(image_refs_of(task.metadata)[0])
    question = {"role": "user", "content": f"{picture}what?"}
    found = chat.prompt([question])
    assert found.pictures is not None
    assert found.pictures.token_ids == found.token_ids
    with pytest.raises(EngineError, match="neither a text without pictures"):
        chat.prompt([{"role": "user", "content": "what?"}])
    with pytest.raises(EngineError, match="neither a text without pictures nor tokens that continue its answer"):
        chat.pictures([*found.token_ids, 5], found.turns, "a rollout")
    reply = RecordedReply((question,), (question,), None, tuple(found.token_ids), (), found.turns)
    later = chat.prompt([question, {"role": "user", "content": f" and {picture}?"}], [reply])
    assert later.continues is None  # the whole conversation is one prompt
    assert later.pictures is not None
    assert later.pictures.blocks == [(0, len(later.token_ids), False)]


def test_a_model_that_needs_pictures_is_served_with_a_chat_template_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture_checkpoint(tmp_path, "paligemma")
    assert main(["serve", str(tmp_path), "--port", "0"]) == 1
    assert "put a chat_template.jinja into the folder" in capsys.readouterr().err


def test_a_text_model_is_refused_an_environment_that_is_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    toy_checkpoint(tmp_path / "toy", "qwen3")
    run = {"model": {"path": str(tmp_path / "toy")}, "rollout": BASE["rollout"], "workflow": "environment"}
    run["taskset"] = {"path": str(picture_rows(tmp_path / "data")), "chat": True, "images": "text"}
    run["environment"] = {"name": "gymnasium", "render_mode": "rgb_array"}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    assert main(["check", str(tmp_path / "run.yaml")]) == 2
    assert "environment.render_mode: rgb_array shows pictures, and the model reads text" in capsys.readouterr().err


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


def test_a_task_without_pictures_is_rendered_by_a_template_that_takes_parts_only(tmp_path: Path) -> None:
    """As LLaVA's, which shows nothing of a content that is a text."""
    config = ModelConfig(path=picture_checkpoint(tmp_path / "model", "llava"))
    policy = load_policy(config, texts=[], seed=0, device=torch.device("cpu"), pictures=True)
    policy.model.picture_processor.processor.chat_template = (
        "{% for m in messages %}{{ m.role[0] }}:{% for p in m.content if p.type == 'text' %}{{ p.text }}{% endfor %}\n"
        "{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
    )
    task = Task("1", [{"role": "user", "content": "how many?"}])
    assert render_prompt(task, policy.tokenizer) == "u:how many?a:"
    chat = ChatRenderer(policy.tokenizer, frozenset())
    assert chat.prompt(list(task.prompt)).text == "u:how many?a:"


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
