"""Worker: one GRPO step on pictures per command with TRL's GRPOTrainer, with the tower frozen as on our side."""

from __future__ import annotations

import io
from typing import Any

from bench.models import PROMPT, pictures, prompts, vision_dir
from bench.peers.trl_step import Reward, arguments, train
from bench.worker import Channel


def build(name: str) -> tuple[Any, Any, Any]:
    """Model, processor and dataset."""
    import torch
    from datasets import Dataset, Features, Image, Value
    from PIL import Image as Pillow
    from transformers import AutoModelForImageTextToText, AutoProcessor

    folder = vision_dir(name)
    model: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    model.model.vision_tower.requires_grad_(False)
    processor = AutoProcessor.from_pretrained(folder, use_fast=False, padding_side="left")
    words = [" ".join(f"w{token}" for token in ids) for ids in prompts(name, 64, PROMPT)]
    shown = [Pillow.open(io.BytesIO(content)).convert("RGB") for content in pictures(64)]
    rows = {"prompt": [[{"role": "user", "content": text}] for text in words], "image": shown}
    chat = [{"role": Value("string"), "content": Value("string")}]
    return model, processor, Dataset.from_dict(rows, features=Features({"prompt": chat, "image": Image()}))


def main() -> None:
    args, reward = arguments().parse_args(), Reward()
    train(args, Channel(), reward, lambda began, seconds: {"tokens": reward.tokens}, lambda: build(args.model))


if __name__ == "__main__":
    main()
