"""Worker: one GRPO step on pictures per command, as in a run: rollout, reward, update, publish.

With `--tower completion` the vision tower runs once per completion, in rollouts and in training; all else is the same.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.models import PROMPT, pictures, prompts, vision_dir
from bench.ours.step import serve_steps
from bench.worker import Channel


def rows(model: str) -> Iterator[dict[str, Any]]:
    """Rows of the taskset: a picture and a random prompt each."""
    for ids, content in zip(prompts(model, 64, PROMPT), pictures(64), strict=True):
        yield {"prompt": " ".join(f"w{token}" for token in ids), "images": content}


def load(folder: Path) -> Any:
    """The policy in a folder of `bench.models.vision_dir`; its completions do not end early."""
    import torch
    from transformers import AutoModelForImageTextToText

    from rollmill.data.picture_prompts import read_processor
    from rollmill.models.load import PolicyModel

    loaded: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    processor = read_processor(folder, {}, loaded.config.image_token_id)
    tokenizer = processor.processor.tokenizer
    loaded.picture_processor = tokenizer.picture_processor = processor
    context = loaded.config.text_config.max_position_embeddings
    return PolicyModel(loaded, tokenizer, frozenset(), 0, context, torch.device("cpu"))


def repeat_tower(times: int) -> None:
    """Run the tower `times` as often as it is needed: on copies of the pictures."""
    import rollmill.models.vision as vision
    import rollmill.trainer.logprobs as logprobs
    from rollmill.data.picture_prompts import PicturePrompt

    once = vision.compute_features

    def repeated(model: Any, needed: Any, passes: int = 0) -> Any:
        found = list(needed)
        if not found:
            return {}
        copies = [
            PicturePrompt(f"{each.key}/{i}", each.token_ids, each.inputs, each.token_types)
            for each in found
            for i in range(times)
        ]
        features = once(model, copies, passes)
        return {each.key: features[f"{each.key}/0"] for each in found}

    for module in (vision, logprobs):
        setattr(module, "compute_features", repeated)  # noqa: B010


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", choices=("auto", "fp32", "bf16"), default="auto")
    parser.add_argument("--tower", choices=("group", "completion"), default="group")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    channel = Channel()
    from rollmill.config.taskset import TasksetConfig

    if args.tower == "completion":
        repeat_tower(args.group)
    taskset = TasksetConfig(function="bench.ours.see:rows", options={"model": args.model}, chat=True)
    asyncio.run(serve_steps(channel, args, policy=load(vision_dir(args.model)), taskset=taskset))


if __name__ == "__main__":
    main()
