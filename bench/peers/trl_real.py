"""Worker: the steps of examples/real.yaml with TRL's GRPOTrainer, one per command."""

from __future__ import annotations

import argparse
from typing import Any

from bench.harness import ROOT
from bench.peers.trl_step import pace, settings
from bench.worker import Channel, versions


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--micro-batch", type=int, required=True, help="completions per forward pass")
    parser.add_argument("--weights", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--set", action="append", default=[])
    args = parser.parse_args()
    channel = Channel()

    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    from rollmill.config.loader import load_run
    from rollmill.models.gguf import forget_quantization, pretrained_source
    from rollmill.user_code import import_object

    torch.set_num_threads(1)
    loaded = load_run(ROOT / "examples" / "real.yaml", args.set)
    stage = loaded.stages[-1]
    score, requests = (import_object(f"{ROOT / 'examples' / 'restaurant.py'}:{name}") for name in ("score", "requests"))
    folder, options = pretrained_source(loaded.config.model.path)  # type: ignore[arg-type]
    dtype = torch.bfloat16 if args.weights == "bf16" else torch.float32
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options)
    forget_quantization(model)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, padding_side="left", **options)
    tokens, mean = 0, 0.0

    def reward(completions: list[Any], completion_ids: list[list[int]], answer: list[str], **_: Any) -> list[float]:
        nonlocal tokens, mean
        tokens = sum(len(ids) for ids in completion_ids)
        found = [
            sum(score(gold, messages[0]["content"]).values())
            for messages, gold in zip(completions, answer, strict=True)
        ]
        mean = sum(found) / len(found)
        return found

    step = argparse.Namespace(
        prompts=stage.rollout.batch,
        group=stage.rollout.group_size,
        new_tokens=stage.rollout.max_new_tokens,
        micro_batch=min(args.micro_batch, stage.rollout.batch * stage.rollout.group_size),
        dtype="bf16",
        cache=None,
        device="cpu",
    )
    trainer = stage.trainer
    config = settings(step) | {
        "learning_rate": trainer.lr,
        "lr_scheduler_type": "constant",
        "adam_beta1": trainer.betas[0],
        "adam_beta2": trainer.betas[1],
        "adam_epsilon": trainer.eps,
        "weight_decay": trainer.weight_decay,
        "max_grad_norm": trainer.max_grad_norm,
    }
    rows = [{"prompt": row["prompt"], "answer": row["answer"]} for row in requests(**stage.required_taskset.options)]
    grpo = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=reward,
        args=GRPOConfig(**config),
        train_dataset=Dataset.from_list(rows),
        callbacks=[pace(channel, lambda began, seconds: {"tokens": tokens, "reward": mean})],
    )
    channel.say(versions=versions("trl", "torch", "transformers", "gguf"))
    grpo.train()


if __name__ == "__main__":
    main()
