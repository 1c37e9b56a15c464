"""Worker: one batch of completions per command with the native engine.

With `--updates` the trained model is in fp32, as in a run, and its weights count as changed before each batch: the
report has the seconds to cast or to round them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from typing import Any

from bench.models import SHAPES, make_model
from bench.worker import Channel, serve, versions


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True, help="checkpoint folder, or the name of a model that is made here")
    parser.add_argument("--prompts", required=True, help="JSON: token ids of every prompt")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--int8", action="store_true")
    parser.add_argument("--updates", action="store_true")
    args = parser.parse_args()
    channel = Channel()

    import torch
    from transformers import AutoModelForCausalLM

    from rollmill.config.rollout import SamplingConfig
    from rollmill.engines.base import GenerationRequest
    from rollmill.engines.native import NativeEngine
    from rollmill.models.cpu.step_timing import StepSize, choose_precision
    from rollmill.types import Completion

    if args.device == "cpu":
        torch.set_num_threads(1)
    began = time.perf_counter()
    model: Any
    if args.model in SHAPES:
        model = make_model(args.model, torch.bfloat16, args.device).eval()
    else:
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype="auto").to(args.device).eval()
    loaded = time.perf_counter()
    precision = args.dtype
    if precision == "auto":
        precision = choose_precision(model.float(), args.device, StepSize.of_generation())
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    model.to(torch.float32 if args.updates else dtype)
    prompts: list[list[int]] = json.loads(args.prompts)

    async def batch() -> tuple[list[Completion], float]:
        """All completions, and seconds until the first one."""
        began, first = time.perf_counter(), 0.0

        async def one(index: int, ids: list[int]) -> list[Completion]:
            nonlocal first
            sampling = SamplingConfig(temperature=1.0, max_new_tokens=args.new_tokens)
            got = []
            async for completion in native.stream(GenerationRequest(ids, sampling, n=args.group, seed=index)):
                first = first or time.perf_counter() - began
                got.append(completion)
            return got

        groups = await asyncio.gather(*(one(index, ids) for index, ids in enumerate(prompts)))
        return [completion for group in groups for completion in group], first

    began_engine = time.perf_counter()
    context = model.config.max_position_embeddings
    native = NativeEngine(model, context=context, dtype=dtype, max_sequences=256, int8=args.int8)
    asyncio.run(
        native.generate(GenerationRequest(prompts[0], SamplingConfig(max_new_tokens=1)))
    )  # ready: it has produced a token
    startup_s = time.perf_counter() - began_engine

    version = 0

    def run() -> dict[str, Any]:
        nonlocal version
        began = time.perf_counter()
        if args.updates:
            native.weights_updated(version := version + 1)
            native.core.weights.refresh()
        update_s, began = time.perf_counter() - began, time.perf_counter()
        completions, first_s = asyncio.run(batch())
        seconds = time.perf_counter() - began
        tokens = sum(len(completion.token_ids) for completion in completions)
        gpu = {"peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 2)} if args.device == "cuda" else {}
        return gpu | {
            "seconds": seconds,
            "tokens": tokens,
            "tokens_per_s": tokens / seconds,
            "first_completion_s": first_s,
            "update_s": update_s,
        }

    serve(
        channel,
        run,
        load_s=loaded - began,
        startup_s=startup_s,
        dtype=precision,
        versions=versions("torch", "transformers"),
    )


if __name__ == "__main__":
    main()
