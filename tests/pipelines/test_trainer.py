"""Completions without any token in the loss, on the real trainer."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from support.made_up import group, process, tokenizer
from support.toys import toy_model

from rollmill.algorithms import build_recipe
from rollmill.config.algorithms import known_algorithms
from rollmill.config.trainer import TrainerConfig
from rollmill.trainer import Trainer
from rollmill.types import Experience, StopReason

CUT, EOS = StopReason.LENGTH, StopReason.EOS


def trained(experiences: list[Experience], **options: Any) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    options = {"name": "grpo", **options}
    algorithm = known_algorithms()[options["name"]].model_validate(options)
    model = toy_model("qwen2", len(tokenizer()))
    config = TrainerConfig(lr=1e-3, precision="fp32")
    recipe = build_recipe(algorithm, max_new_tokens=100, reward_weights={"exact": 1.0})
    metrics = Trainer(model, recipe, config, total_steps=2).step(experiences, 3)
    return metrics, {name: value.detach().clone() for name, value in model.named_parameters()}


def batch(stop: list[StopReason], values: tuple[float, ...] = (1.0, 0.0, 1.0)) -> list[Experience]:
    found, _ = process("truncated", group(list(values), length=[5, 7, 3], stop=stop))
    for each in found:
        each.greedy_reward = 0.5
    return found


NAMES = [
    "grpo", "dr_grpo", "dapo", "rloo", "reinforce", "reinforce_plus_plus", "remax", "ppo", "gspo", "kimi", "opmd",
    "gdpo", "stepwise_grpo", "gigpo", "topr", "raft", "sppo",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_masked_completions_are_safe_for_every_algorithm(name: str) -> None:
    experiences = batch([EOS, CUT, EOS])
    metrics, weights = trained(experiences, name=name)
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics["tokens"] == 8
    assert all(torch.isfinite(each).all() for each in weights.values())
    assert experiences[1].advantage is not None
    assert not experiences[1].advantage.any()


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_of_masked_completions_changes_nothing(name: str) -> None:
    metrics, weights = trained(batch([CUT, CUT, CUT]), name=name)
    untouched = toy_model("qwen2", len(tokenizer()))
    assert all(torch.equal(weights[key], value) for key, value in untouched.named_parameters())
    assert (metrics["tokens"], metrics["skipped"]) == (0, 1)
    assert all(math.isfinite(value) for value in metrics.values())


def test_the_reward_of_a_masked_completion_is_in_the_baseline() -> None:
    masked = batch([EOS, CUT, EOS], (1.0, 0.0, 0.5))
    trained(masked, name="dr_grpo")
    assert masked[0].advantage is not None
    assert masked[0].advantage[-1] == pytest.approx(0.5)  # 1 - mean(1, 0, .5)
    assert masked[2].advantage is not None
    assert masked[2].advantage[-1] == 0


def test_masking_equals_leaving_out_where_the_baseline_is_the_same() -> None:
    values = (1.0, 0.5, 0.0)
    _, with_masked = trained(batch([EOS, CUT, EOS], values), name="dr_grpo", aggregation="token-mean")
    without = [each for each in batch([EOS, CUT, EOS], values) if each.action_tokens]
    _, left_out = trained(without, name="dr_grpo", aggregation="token-mean")
    assert all(np.allclose(with_masked[key], left_out[key], atol=1e-7) for key in with_masked)
