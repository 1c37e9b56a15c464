"""The first step after a rollout: the engine's log-probs are the trainer's, so the ratio is 1, nothing is clipped."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from support.toys import toy_model

from rollmill.algorithms import build_recipe
from rollmill.config.algorithms import GRPO
from rollmill.config.rollout import SamplingConfig
from rollmill.config.trainer import TrainerConfig
from rollmill.engines.base import GenerationRequest
from rollmill.engines.native import NativeEngine
from rollmill.trainer import Trainer
from rollmill.types import Experience, experience_from_completion

VOCAB = 130


def rolled_out(model: Any, temperature: float) -> list[Experience]:
    """Four groups of four, with differing rewards."""
    engine = NativeEngine(model, context=256, max_sequences=7, prefill_tokens=16)
    sampling = SamplingConfig(temperature=temperature, max_new_tokens=30)

    async def main() -> list[list[Any]]:
        prompts = [[8 + (7 * n + i) % 120 for i in range(3 + 9 * n)] for n in range(4)]
        requests = [GenerationRequest(prompt, sampling, n=4, seed=n) for n, prompt in enumerate(prompts)]
        return list(await asyncio.gather(*(engine.generate(request) for request in requests)))

    experiences = []
    for g, group in enumerate(asyncio.run(main())):
        for i, completion in enumerate(group):
            one = experience_from_completion(
                completion, id=f"{g}/{i}", task_id=f"t{g}", group=f"g{g}", prompt="", temperature=temperature
            )
            one.reward = float(i % 2)
            experiences.append(one)
    return experiences


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "llama", "gemma", "gemma2"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_ratio_is_one_and_the_kl_to_an_equal_reference_zero(architecture: str, temperature: float) -> None:
    model = toy_model(architecture, vocab_size=VOCAB)
    experiences = rolled_out(model, temperature)
    recipe = build_recipe(GRPO.model_validate({"kl": 0.1, "proximal": "rollout"}), max_new_tokens=30)
    # two updates, so that the ratio is to what the engine recorded, and a learning rate that moves nothing
    config = TrainerConfig(lr=1e-30, precision="fp32", updates_per_batch=2)
    metrics = Trainer(model, recipe, config, total_steps=1).step(experiences, 0)
    assert metrics["updates"] == 2
    assert metrics["ratio/mean"] == pytest.approx(1, abs=1e-5)
    assert metrics["ratio/clip_fraction"] == 0
    assert metrics["logprob_gap/max"] < 1e-5
    single = Trainer(model, recipe, TrainerConfig(lr=1e-30, precision="fp32"), total_steps=1).step(experiences, 0)
    assert (single["ratio/mean"], single["kl_ref"], single["loss/kl"]) == (1, 0, 0)


def test_a_rollout_at_another_temperature_would_be_noticed() -> None:
    model = toy_model("qwen3", vocab_size=VOCAB)
    experiences = rolled_out(model, 0.7)
    for each in experiences:
        each.temperature = 1.0
    trainer = Trainer(
        model, build_recipe(GRPO(), max_new_tokens=30), TrainerConfig(lr=1e-30, precision="fp32"), total_steps=1
    )
    assert trainer.step(experiences, 0)["logprob_gap/mean"] > 0.01
