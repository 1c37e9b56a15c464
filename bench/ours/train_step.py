"""Worker: one optimizer step of the trainer per command, on synthetic rollouts."""

from __future__ import annotations

import argparse
import time
from typing import Any

from bench.models import SHAPES, make_model, model_dir, set_allocator
from bench.peers.rollouts import rollouts
from bench.worker import Channel, serve, versions


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", choices=("auto", "fp32", "bf16"), default="auto")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--param-dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--checkpointing", action="store_true")
    args = parser.parse_args()
    channel = Channel()
    began = time.perf_counter()
    trainer, batch = ready_made(args)

    import torch

    def step() -> dict[str, Any]:
        started, cpu = time.perf_counter(), time.process_time()
        metrics = trainer.step(batch, 0)
        gpu = {}
        if args.device == "cuda":
            torch.cuda.synchronize()
            gpu["peak_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 2)
        seconds, cpu_s = time.perf_counter() - started, time.process_time() - cpu
        learned = sum(bool(experience.advantage.any()) for experience in batch if experience.advantage is not None)
        return gpu | {"seconds": seconds, "cpu_s": cpu_s, "tokens": int(metrics["tokens"]), "learned": learned}

    startup_s = time.perf_counter() - began
    serve(channel, step, startup_s=startup_s, dtype=trainer.precision, versions=versions("torch", "transformers"))


def ready_made(args: argparse.Namespace) -> tuple[Any, list[Any]]:
    """Make a trainer and the rollouts of a step. On a GPU the model is made there, of any size."""
    import torch
    from transformers import AutoModelForCausalLM

    from bench.ours.experiences import experiences
    from rollmill.algorithms import build_recipe
    from rollmill.config.algorithms import GRPO
    from rollmill.config.trainer import TrainerConfig
    from rollmill.trainer import Trainer

    set_allocator(args.model)
    vocab = SHAPES[args.model].vocab_size
    model: Any
    if args.device == "cpu":
        torch.set_num_threads(1)
        model = AutoModelForCausalLM.from_pretrained(model_dir(args.model), dtype=torch.float32)
    else:
        model = make_model(args.model, torch.bfloat16 if args.param_dtype == "bf16" else torch.float32, args.device)
    recipe = build_recipe(GRPO(), max_new_tokens=args.new_tokens)
    more = {"param_dtype": args.param_dtype, "gradient_checkpointing": args.checkpointing}
    config = TrainerConfig(lr=1e-5, precision=args.dtype, **more)
    trainer = Trainer(model, recipe, config, total_steps=100_000, device=args.device)
    return trainer, experiences(rollouts(vocab, [(20, [args.new_tokens] * args.group)] * args.prompts), vocab)


if __name__ == "__main__":
    main()
