"""Worker: one optimizer step per command, on one or more ranks, on synthetic rollouts."""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.models import SHAPES, model_dir
from bench.peers.rollouts import rollouts
from bench.worker import Channel, serve, versions


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--sharding", default="none")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=64)
    args = parser.parse_args()
    channel = Channel()

    import torch
    from transformers import AutoModelForCausalLM

    from bench.ours.experiences import experiences
    from rollmill.config.algorithms import GRPO
    from rollmill.config.trainer import TrainerConfig
    from rollmill.trainer import DistributedTrainer
    from rollmill.trainer.distributed.ranks import RankGroup
    from rollmill.trainer.distributed.spec import TrainerSpec

    torch.set_num_threads(1)
    vocab, cpu = SHAPES[args.model].vocab_size, torch.device("cpu")
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir(args.model), dtype=torch.float32)
    config = TrainerConfig(lr=1e-5, ranks=args.ranks, sharding=args.sharding)
    plan = TrainerSpec(GRPO(), config, "fp32", 100_000, args.new_tokens, seed=0)
    batch = experiences(rollouts(vocab, [(20, [args.new_tokens] * args.group)] * args.prompts), vocab)
    with tempfile.TemporaryDirectory(prefix="bench-ranks-") as folder:
        ranked = DistributedTrainer(plan, model, None, cpu, Path(folder)) if args.ranks > 1 else None
        trainer = ranked or plan.trainer(model, None, cpu, RankGroup())
        if ranked is not None:
            ranked.start()

        def step() -> dict[str, Any]:
            began = time.perf_counter()
            metrics = trainer.step(batch, 0)
            seconds = time.perf_counter() - began
            found = {key: metrics[key] for key in ("loss", "grad_norm")}
            return {"tokens_per_s": round(metrics["tokens"] / seconds, 1), **found}

        try:
            serve(channel, step, versions=versions("torch", "transformers"))
        finally:
            if ranked is not None:
                ranked.close()


if __name__ == "__main__":
    main()
