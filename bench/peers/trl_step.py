"""Worker: one GRPO step per command with TRL's GRPOTrainer.

TRL's fastest CPU settings: plain `generate` (a static cache, the paged path and continuous batching are all slower
there), no gradient checkpointing, no logging, the whole batch in one micro-batch.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from bench.models import model_dir, prompts
from bench.worker import Channel


def even_ids(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """The reward: share of even token ids."""
    return [sum(1 for token in ids if token % 2 == 0) / len(ids) for ids in completion_ids]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", choices=("fp32", "bf16", "pure-bf16"), default="fp32")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--cache", default=None)
    parser.add_argument("--micro", type=int, default=0, help="completions per forward pass; 0 takes all at once")
    args = parser.parse_args()
    channel = Channel()
    began = time.perf_counter()

    import tempfile

    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(1)
    folder = model_dir(args.model)
    micro = args.micro or args.prompts * args.group
    dtype = torch.bfloat16 if args.dtype == "pure-bf16" else torch.float32

    class Pace(TrainerCallback):  # type: ignore[misc]
        """Starts a step when the parent says so."""

        def __init__(self) -> None:
            self.commands = channel.commands()
            self.started = self.cpu = 0.0

        def on_step_begin(self, _args: Any, state: Any, control: Any, **_: Any) -> None:
            if next(self.commands, None) is None:
                raise SystemExit
            self.started, self.cpu = time.perf_counter(), time.process_time()

        def on_step_end(self, _args: Any, state: Any, control: Any, **_: Any) -> None:
            if args.device == "cuda":
                torch.cuda.synchronize()
            channel.say(seconds=time.perf_counter() - self.started, cpu_s=time.process_time() - self.cpu)

    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=args.prompts * args.group // micro,
        num_generations=args.group,
        max_completion_length=args.new_tokens,
        max_steps=100_000,
        learning_rate=1e-5,
        temperature=1.0,
        beta=0.0,
        loss_type="grpo",
        bf16=args.dtype != "fp32",
        gradient_checkpointing=False,
        cache_implementation=args.cache,
        use_cpu=args.device == "cpu",
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    words = [" ".join(f"w{token}" for token in ids) for ids in prompts(args.model, 256, 20)]
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=dtype),
        processing_class=AutoTokenizer.from_pretrained(folder, padding_side="left"),
        reward_funcs=even_ids,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": words}),
        callbacks=[Pace()],
    )
    channel.say(startup_s=time.perf_counter() - began)
    trainer.train()


if __name__ == "__main__":
    main()
