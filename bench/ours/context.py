"""Worker: a step on one long row, or the prefill of one long prompt, and the memory that it takes."""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from bench.models import SHAPES, model_dir
from bench.peers.rollouts import rollouts
from bench.worker import Channel, serve, versions

GROUP, NEW_TOKENS, SHORT_PROMPT = 4, 64, 16
GIB = 2**30


class PeakMemory:
    """Largest resident memory of this process or one of its children while a block runs, above that before."""

    def __init__(self) -> None:
        own = psutil.Process()
        self._processes = [own, *own.children(recursive=True)]

    @contextmanager
    def watched(self) -> Iterator[dict[str, float]]:
        """Samples every few milliseconds; fills in `work_gib` and `held_gib` (before the block) at the end."""
        before, found = self._resident(), dict[str, float]()
        peak, over = list(before), threading.Event()

        def watch() -> None:
            while not over.wait(0.005):
                peak[:] = map(max, peak, self._resident())

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield found
        finally:
            over.set()
            thread.join()
            found["work_gib"] = max(a - b for a, b in zip(peak, before, strict=True)) / GIB
            found["held_gib"] = max(before) / GIB

    def _resident(self) -> list[int]:
        return [each.memory_info().rss for each in self._processes]


def batch_of(kind: str, tokens: int, vocab: int) -> Any:
    """A group whose row has `tokens` tokens, less the group's own: most of them a prompt, or one completion."""
    from bench.ours.experiences import experiences

    if kind == "prompt":
        made = rollouts(vocab, [(tokens - NEW_TOKENS, [NEW_TOKENS] * GROUP)])
    else:
        made = rollouts(vocab, [(SHORT_PROMPT, [tokens - SHORT_PROMPT, 1])])
    return experiences(made, vocab)


def training(args: argparse.Namespace, model: Any) -> tuple[Callable[[], dict[str, Any]], Callable[[], None]]:
    """One step of one or more ranks, and what ends them."""
    import torch

    from rollmill.config.algorithms import GRPO
    from rollmill.config.trainer import TrainerConfig
    from rollmill.trainer import DistributedTrainer
    from rollmill.trainer.distributed.ranks import RankGroup
    from rollmill.trainer.distributed.spec import TrainerSpec

    vocab, cpu = SHAPES[args.model].vocab_size, torch.device("cpu")
    sharding: dict[str, Any] = {} if args.ranks == 1 else {"sharding": "context", "rank_deadline_s": 7200}
    config = TrainerConfig(
        lr=1e-6, ranks=args.ranks, gradient_checkpointing=True, micro_batch_tokens=args.tokens + 1024, **sharding
    )
    plan = TrainerSpec(GRPO(), config, "fp32", 100_000, args.tokens, seed=0)
    folder = tempfile.TemporaryDirectory(prefix="bench-context-")
    ranked = DistributedTrainer(plan, model, None, cpu, Path(folder.name)) if args.ranks > 1 else None
    trainer: Any = ranked or plan.trainer(model, None, cpu, RankGroup())
    trainer.start()
    trainer.step(batch_of("prompt", 4 * NEW_TOKENS, vocab), 0)  # gradients' and optimizer's memory
    batch, memory = batch_of(args.kind, args.tokens, vocab), PeakMemory()

    def step() -> dict[str, Any]:
        with memory.watched() as found:
            began = time.perf_counter()
            metrics = trainer.step(batch, 0)
            seconds = time.perf_counter() - began
        sizes = {"seconds": round(seconds, 2), "tokens_per_s": round(args.tokens / seconds, 1)}
        return found | sizes | {key: metrics[key] for key in ("loss", "grad_norm")}

    def end() -> None:
        if ranked is not None:
            ranked.close()
        folder.cleanup()

    return step, end


def prefill(args: argparse.Namespace, model: Any) -> Callable[[], dict[str, Any]]:
    """The engine's prefill and first tokens of a group, or transformers' forward pass over the prompt."""
    import torch

    from rollmill.config.rollout import SamplingConfig
    from rollmill.engines.base import GenerationRequest
    from rollmill.engines.native import NativeEngine

    vocab = SHAPES[args.model].vocab_size
    [(prompt, _)] = rollouts(vocab, [(args.tokens - NEW_TOKENS, [1])])
    sampling = SamplingConfig(max_new_tokens=1)

    def engine() -> dict[str, Any]:
        made = NativeEngine(model, None, context=args.tokens)
        asyncio.run(made.generate(GenerationRequest(prompt_ids=prompt, sampling=sampling, n=GROUP, seed=1)))
        return {"cache_gib": made.core.cache_bytes() / GIB}

    @torch.no_grad()
    def transformers() -> dict[str, Any]:
        model(input_ids=torch.tensor([prompt]), use_cache=True, logits_to_keep=1)
        return {}

    def run() -> dict[str, Any]:
        memory = PeakMemory()
        with memory.watched() as found:
            began = time.perf_counter()
            extra = engine() if args.side == "engine" else transformers()
            seconds = time.perf_counter() - began
        return found | extra | {"seconds": round(seconds, 2), "tokens_per_s": round(len(prompt) / seconds, 1)}

    return run


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--kind", choices=("prompt", "completion", "prefill"), required=True)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--side", choices=("engine", "transformers"), default="engine")
    args, channel = parser.parse_args(), Channel()

    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir(args.model), dtype=torch.float32)
    if args.kind == "prefill":
        serve(channel, prefill(args, model), versions=versions("torch", "transformers"))
        return
    step, end = training(args, model)
    try:
        serve(channel, step, versions=versions("torch", "transformers"))
    finally:
        end()


if __name__ == "__main__":
    main()
