"""Worker: repairs the same checkpoint with TRL's GRPOTrainer; each command runs a few steps and evaluates."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from bench.peers.trl_step import settings
from bench.worker import Channel, versions


def right(completion: str, answer: str) -> float:
    """Reward: 1 if the text after the last `#` is the sum."""
    _, mark, found = completion.rpartition("#")
    return float(bool(mark) and found.strip() == answer)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--every", type=int, required=True)
    args = parser.parse_args()
    channel = Channel()

    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(1)
    task = json.loads((args.folder / "settings.json").read_text())
    held_out, train = (
        [json.loads(line) for line in (args.folder / name).read_text().splitlines()]
        for name in ("held_out.jsonl", "train.jsonl")
    )
    model: Any = AutoModelForCausalLM.from_pretrained(args.folder / "model", dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(args.folder / "model", padding_side="left")
    tokens = 0

    def reward(completions: list[str], completion_ids: list[list[int]], answer: list[str], **_: Any) -> list[float]:
        nonlocal tokens
        tokens += sum(len(ids) for ids in completion_ids)
        return [right(text, gold) for text, gold in zip(completions, answer, strict=True)]

    @torch.no_grad()
    def accuracy() -> float:
        model.eval()
        inputs = tokenizer([row["prompt"] for row in held_out], return_tensors="pt", padding=True)
        inputs.pop("token_type_ids", None)
        out_BT = model.generate(**inputs, do_sample=True, top_k=0, top_p=1.0, max_new_tokens=task["new_tokens"])
        texts = tokenizer.batch_decode(out_BT[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        model.train()
        return sum(right(text, row["answer"]) for text, row in zip(texts, held_out, strict=True)) / len(held_out)

    class Pace(TrainerCallback):  # type: ignore[misc]
        """Runs a step when the parent requests it."""

        def __init__(self) -> None:
            self.commands = channel.commands()
            self.started = self.seconds = 0.0

        def on_step_begin(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
            if state.global_step % args.every == 0 and next(self.commands, None) is None:
                raise SystemExit
            self.started = time.perf_counter()

        def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
            nonlocal tokens
            self.seconds += time.perf_counter() - self.started
            if state.global_step % args.every == 0:
                channel.say(seconds=self.seconds, tokens=tokens, accuracy=accuracy())
                self.seconds, tokens = 0.0, 0

    step = argparse.Namespace(
        prompts=task["prompts"],
        group=task["group"],
        new_tokens=task["new_tokens"],
        micro_batch=0,
        dtype="fp32",
        cache=None,
        device="cpu",
    )
    config = settings(step) | {
        "learning_rate": task["lr"],
        "lr_scheduler_type": "constant",
        "adam_beta1": task["betas"][0],
        "adam_beta2": task["betas"][1],
        "adam_epsilon": task["eps"],
        "weight_decay": task["weight_decay"],
        "max_grad_norm": task["max_grad_norm"],
        "seed": args.seed,
    }
    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=reward,
        args=GRPOConfig(**config),
        train_dataset=Dataset.from_list([{"prompt": row["prompt"], "answer": row["answer"]} for row in train]),
        callbacks=[Pace()],
    )
    channel.say(accuracy=accuracy(), versions=versions("trl", "torch", "transformers"))
    trainer.train()


if __name__ == "__main__":
    main()
