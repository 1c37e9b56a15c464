"""Worker: one optimizer step per command with TRL's GRPOTrainer, on synthetic rollouts.

TRL gets them from a rollout function and prepares its tensors and advantages during the warm-up; later steps train on
the same tensors. The other settings are those of `bench.peers.trl_step`.
"""

from __future__ import annotations

import time
from typing import Any

from bench.models import SHAPES, model_dir
from bench.peers.rollouts import mean_id, rollouts
from bench.peers.trl_step import arguments, pace, settings
from bench.worker import Channel, versions


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Rewards of the completions."""
    return [mean_id(ids) for ids in completion_ids]


def main() -> None:
    args = arguments().parse_args()
    channel = Channel()
    began = time.perf_counter()

    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    if args.device == "cpu":
        torch.set_num_threads(1)
    folder = model_dir(args.model)
    groups = rollouts(SHAPES[args.model].vocab_size, [(20, [args.new_tokens] * args.group)] * args.prompts)
    by_prompt = {" ".join(f"w{token}" for token in prompt): (prompt, completions) for prompt, completions in groups}

    def made_up(prompts: list[str], _: Any) -> dict[str, Any]:
        left = {text: iter(completions) for text, (_, completions) in by_prompt.items()}
        completion_ids = [next(left[text]) for text in prompts]
        return {"prompt_ids": [by_prompt[text][0] for text in prompts], "completion_ids": completion_ids,
                "logprobs": None}  # fmt: skip

    class Prepared(GRPOTrainer):  # type: ignore[misc]
        """Prepares one batch and trains on it at every step."""

        prepared: dict[str, Any] | None = None

        def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
            if self.prepared is None:
                self.prepared = super()._generate_and_score_completions(inputs)
            return dict(self.prepared)

    def report(began: float, seconds: float) -> dict[str, Any]:
        assert trainer.prepared is not None
        tokens = int(trainer.prepared["completion_mask"].sum())
        return {"tokens": tokens, "learned": int((trainer.prepared["advantages"] != 0).sum())}

    trainer = Prepared(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(folder, padding_side="left"),
        reward_funcs=reward,
        args=GRPOConfig(**settings(args)),
        train_dataset=Dataset.from_dict({"prompt": list(by_prompt)}),
        rollout_func=made_up,
        callbacks=[pace(channel, report, args.device)],
    )
    channel.say(startup_s=time.perf_counter() - began, versions=versions("trl", "torch", "transformers"))
    trainer.train()


if __name__ == "__main__":
    main()
