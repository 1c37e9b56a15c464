"""Rows with pictures, and runs that train tiny vision-language models on them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml
from PIL import Image

from bench.tiny_pictures import FAMILIES, picture_checkpoint

__all__ = ["COLOURS", "FAMILIES", "picture_checkpoint", "picture_rows", "picture_run"]

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


def picture_run(folder: Path, family: str = "qwen2_vl", text: dict[str, Any] | None = None, **changes: Any) -> Path:
    """Write a run file of two stages that trains a tiny policy on pictures; `text` changes its text config."""
    rows = picture_rows(folder / "data")
    run: dict[str, Any] = {
        "name": "see",
        "model": {"path": str(picture_checkpoint(folder / "model", family, **(text or {})))},
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
    run = {key: value for key, value in (run | changes).items() if value is not None}
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(run))
    return path
