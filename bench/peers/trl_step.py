"""Worker: one GRPO step per command with TRL's GRPOTrainer.

The common settings are TRL's fastest on a CPU: plain `generate`, no gradient checkpointing, no reference model, no
logging and no saving.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from collections.abc import Callable
from typing import Any

from bench.models import model_dir, prompts
from bench.worker import Channel, versions


class Reward:
    """Share of even token ids; stores the number of tokens."""

    __name__ = "even_ids"

    def __init__(self) -> None:
        self.tokens = 0

    def __call__(self, completion_ids: list[list[int]], **_: Any) -> list[float]:
        self.tokens = sum(len(ids) for ids in completion_ids)
        return [sum(1 for token in ids if token % 2 == 0) / len(ids) for ids in completion_ids]


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """Arguments of GRPOConfig."""
    completions = args.prompts * args.group
    micro_batch = args.micro_batch or completions
    return {
        "output_dir": tempfile.mkdtemp(),
        "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": completions // micro_batch,
        "num_generations": args.group,
        "max_completion_length": args.new_tokens,
        "max_steps": 100_000,
        "learning_rate": 1e-5,
        "temperature": 1.0,
        "beta": 0.0,
        "loss_type": "grpo",
        "bf16": args.dtype == "bf16",
        "gradient_checkpointing": False,
        "cache_implementation": args.cache,
        "use_cpu": args.device == "cpu",
        "report_to": [],
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }


def pace(channel: Channel, report: Callable[[float, float], dict[str, Any]], device: str = "cpu") -> Any:
    """Build a callback that starts a step at each of the parent's commands, and sends its seconds and `report`.

    `report` gets the start and the seconds of a step, and returns what else to send.
    """
    import torch
    from transformers import TrainerCallback

    class Pace(TrainerCallback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.commands = channel.commands()
            self.started = self.cpu = 0.0

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            if next(self.commands, None) is None:
                raise SystemExit
            self.started, self.cpu = time.perf_counter(), time.process_time()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            if device == "cuda":
                torch.cuda.synchronize()
            seconds, cpu_s = time.perf_counter() - self.started, time.process_time() - self.cpu
            channel.say(seconds=seconds, cpu_s=cpu_s, **report(self.started, seconds))

    return Pace()


def train(args: argparse.Namespace, channel: Channel, reward: Any, report: Callable[[float, float], dict[str, Any]],
          made: Callable[[], tuple[Any, Any, Any]] | None = None, **more: Any) -> None:  # fmt: skip
    """Run one step per command and send `report(began, seconds)`; `more` are arguments of GRPOConfig.

    `made` returns model, tokenizer or processor, and dataset, in place of `args.model` and its prompts.
    """
    began = time.perf_counter()

    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    if args.device == "cpu":
        torch.set_num_threads(1)

    if made is None:
        folder = model_dir(args.model)
        words = [" ".join(f"w{token}" for token in ids) for ids in prompts(args.model, 256, 20)]
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, args.weights))
        processor = AutoTokenizer.from_pretrained(folder, padding_side="left")
        rows = Dataset.from_dict({"prompt": words})
    else:
        model, processor, rows = made()
    trainer = GRPOTrainer(
        model=model,
        processing_class=processor,
        reward_funcs=reward,
        args=GRPOConfig(**settings(args) | more),
        train_dataset=rows,
        callbacks=[pace(channel, report, args.device)],
    )
    channel.say(startup_s=time.perf_counter() - began, versions=versions("trl", "torch", "transformers"))
    trainer.train()


def arguments() -> argparse.ArgumentParser:
    """Command-line parser with the common options."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help="bf16: autocast over fp32 weights")
    parser.add_argument("--weights", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--micro-batch", type=int, default=0, help="completions per forward pass; 0 takes all at once")
    parser.add_argument("--cache", default=None, help="GRPOConfig.cache_implementation")
    parser.add_argument("--device", default="cpu")
    return parser


def main() -> None:
    args, reward = arguments().parse_args(), Reward()

    def report(began: float, seconds: float) -> dict[str, Any]:
        return {"tokens": reward.tokens, "gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}

    train(args, Channel(), reward, report)


if __name__ == "__main__":
    main()
