"""Worker: completions of prompts with a picture each, one batch per command, with the native engine.

Pictures are new in every batch, so that the processor and the tower run once for each of them.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from itertools import count
from typing import Any

from bench.models import pictures, shown_prompts, vision_dir
from bench.ours.see import load
from bench.worker import Channel, serve, versions


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", choices=("auto", "fp32", "bf16"), default="auto")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=64)
    args = parser.parse_args()
    channel = Channel()

    import torch

    from rollmill.config.rollout import SamplingConfig
    from rollmill.engines.base import GenerationRequest
    from rollmill.engines.native import NativeEngine
    from rollmill.models.cpu.step_timing import StepSize, choose_precision
    from rollmill.types import Completion

    torch.set_num_threads(1)
    policy = load(vision_dir(args.model, "idefics3"))
    precision = args.dtype
    if precision == "auto":
        precision = choose_precision(policy.model, policy.device, StepSize.of_generation())
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    policy.model.to(dtype).eval()
    engine = NativeEngine(policy.model, context=policy.context, dtype=dtype, max_sequences=256)
    processor, texts, batches = policy.model.picture_processor, shown_prompts(args.model, args.prompts), count()

    async def group(number: int, text: str, content: bytes) -> list[Completion]:
        seen = processor.encode(text, [content], f"prompt {number}")
        sampling = SamplingConfig(temperature=1.0, max_new_tokens=args.new_tokens)
        return await engine.generate(
            GenerationRequest(seen.token_ids, sampling, n=args.group, seed=number, pictures=seen)
        )

    async def batch(shown: list[bytes]) -> list[list[Completion]]:
        pairs = enumerate(zip(texts, shown, strict=True))
        return await asyncio.gather(*(group(number, *pair) for number, pair in pairs))

    def run() -> dict[str, Any]:
        shown = pictures(args.prompts, seed=next(batches))
        began, cpu = time.perf_counter(), time.process_time()
        groups = asyncio.run(batch(shown))
        seconds, cpu_s = time.perf_counter() - began, time.process_time() - cpu
        tokens = sum(len(each.token_ids) for group in groups for each in group)
        read = sum(len(group[0].prompt_ids) for group in groups)
        return {"seconds": seconds, "cpu_s": cpu_s, "tokens": tokens, "prompt_tokens": read, "rate": tokens / cpu_s}

    serve(channel, run, dtype=precision, versions=versions("torch", "transformers"))


if __name__ == "__main__":
    main()
