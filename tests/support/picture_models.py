"""Rows with pictures, and runs that train tiny vision-language models on them."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from PIL import Image

from bench.tiny_pictures import FAMILIES, picture_checkpoint
from rollmill.config.model import ModelConfig
from rollmill.data.picture_prompts import PicturePrompt
from rollmill.models.load import PolicyModel, load_policy

__all__ = [
    "COLOURS",
    "FAMILIES",
    "load_seeing",
    "noise_picture",
    "picture_checkpoint",
    "picture_prompt",
    "picture_rows",
    "picture_run",
]

COLOURS = [(255, 0, 0), (0, 255, 0), (0, 0, 255), (250, 250, 250)]


def load_seeing(folder: Path, family: str, seed: int = 0, **text: Any) -> PolicyModel:
    """A tiny model of a family, loaded from a checkpoint in `folder`; `text` changes its text config."""
    config = ModelConfig(path=picture_checkpoint(folder, family, seed, **text))
    return load_policy(config, texts=[], seed=0, device=torch.device("cpu"), pictures=True)


def noise_picture(width: int, height: int, seed: int) -> bytes:
    """A PNG of random pixels."""
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    content = io.BytesIO()
    Image.fromarray(pixels).save(content, "PNG")
    return content.getvalue()


def picture_prompt(policy: PolicyModel, question: str, *pictures: bytes) -> PicturePrompt:
    """A question after these pictures, encoded by the model's processor."""
    processor: Any = policy.model.picture_processor
    if processor.single_prompt:
        text = processor.plain(question, len(pictures))
    else:
        text = processor.render([{"role": "user", "content": question}], policy.tokenizer, [(None, 0)] * len(pictures))
    found: PicturePrompt = processor.encode(text, pictures, "task 1")
    return found


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


def picture_run(folder: Path, family: str = "qwen2_vl", text: dict[str, Any] | None = None, **changes: Any) -> Path:
    """Write a run file of two stages that trains a tiny policy on pictures; `text` changes its text config."""
    rows = picture_rows(folder / "data")
    run: dict[str, Any] = {
        "name": "see",
        "model": {"path": str(picture_checkpoint(folder / "model", family, **(text or {})))},
        "taskset": {"path": str(rows), "chat": family != "paligemma"},
        "rewards": [{"name": "format", "pattern": "[0-9]"}],
        "rollout": {"batch": 2, "group_size": 4, "max_new_tokens": 4},
        "trainer": {"lr": 1e-3},
        "checkpoint": {"every": 1, "keep_last": 9},
        "stages": [
            {"name": "warm", "algorithm": {"name": "sft", "batch": 4}, "steps": 2},
            {"name": "see", "algorithm": {"name": "grpo", "kl": {"coefficient": 0.01}}, "steps": 2},
        ],
    }
    run = {key: value for key, value in (run | changes).items() if value is not None}
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(run))
    return path
