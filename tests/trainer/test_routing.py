"""Router replay in the trainer: experts of the rollout in packed rows, and the gap to the engine that goes away."""

from __future__ import annotations

import asyncio
import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.toys import toy_checkpoint, toy_model
from torch import Tensor

from rollmill.algorithms import build_recipe
from rollmill.config.algorithms import GRPO
from rollmill.config.algorithms.base import KLOptions
from rollmill.config.model import LoRAConfig, ModelConfig
from rollmill.config.rollout import SamplingConfig
from rollmill.config.trainer import TrainerConfig
from rollmill.engines.base import GenerationRequest
from rollmill.engines.native import NativeEngine
from rollmill.models.load import load_policy
from rollmill.models.routing import find_routers, replay_routing, routing_shape
from rollmill.trainer import Trainer
from rollmill.trainer.batch import build_micro_batches, build_token_table
from rollmill.trainer.logprobs import compute_logprobs, use_packed_attention
from rollmill.types import Experience, experience_from_completion

CPU = torch.device("cpu")


def rolled_out(model: Any, *, dtype: torch.dtype = torch.float32, new: int = 12) -> list[Experience]:
    """Three groups of four completions with a reward each, the first group's prompt in several pieces."""
    record = routing_shape(model) is not None
    engine = NativeEngine(model, context=256, dtype=dtype, prefill_tokens=16, record_routing=record)
    prompts = [[(7 * i + j) % 120 + 2 for i in range(length)] for j, length in enumerate((30, 3, 11))]
    sampling = SamplingConfig(max_new_tokens=new)

    async def main() -> list[Any]:
        requests = [GenerationRequest(prompt, sampling, n=4, seed=i) for i, prompt in enumerate(prompts)]
        return await asyncio.gather(*map(engine.generate, requests))

    found = []
    for number, group in enumerate(asyncio.run(main())):
        names = {"task_id": f"t{number}", "group": f"g{number}", "prompt": "", "temperature": 1.0}
        for each in group:
            experience = experience_from_completion(each, id=f"g{number}/{each.index}", **names)
            found.append(replace(experience, reward=float(each.index % 2)))
    return found


def elsewhere(experiences: list[Experience], experts: int, k: int) -> list[Experience]:
    """The same tokens through random experts; prompts of a group share theirs, as in the engine."""
    made = []
    for number, each in enumerate(experiences):
        assert each.routing is not None
        tokens, layers = each.routing.shape[:2]
        prompt = tokens + 1 - each.action_tokens
        parts = [
            np.random.default_rng(seed).random((count, layers, experts)).argsort(-1)[..., :k].astype(np.uint8)
            for seed, count in ((int(each.group[1:]), prompt), (100 + number, tokens - prompt))
        ]
        made.append(replace(each, routing=np.concatenate(parts)))
    return made


def logprobs(model: Any, experiences: list[Experience], *, replay: bool, bf16: bool = False) -> Tensor:
    """By packed rows, of all action tokens."""
    table = build_token_table(experiences, CPU)
    found = torch.zeros(len(table.target))
    with torch.no_grad():
        for micro in build_micro_batches(
            experiences, table, range(len(experiences)), 128, CPU, routing=routing_shape(model)
        ):
            with use_packed_attention(model, micro, replay=replay):
                found[micro.tokens] = compute_logprobs(model, micro, table, bf16=bf16)[0].float()
    return found


def gap(model: Any, experiences: list[Experience], **options: Any) -> Tensor:
    """|trainer - rollout| of every token."""
    found = logprobs(model, experiences, **options)
    return (found - build_token_table(experiences, CPU).rollout_logprob).abs()


@pytest.mark.parametrize("architecture", ["qwen3_moe", "mixtral"])
def test_packed_rows_with_shared_prompts_take_every_tokens_own_experts(architecture: str) -> None:
    """Against one plain pass per sequence, whose routers are given that sequence's experts."""
    model = toy_model(architecture, seed=2)
    own = rolled_out(model)
    assert float((logprobs(model, own, replay=True) - logprobs(model, own, replay=False)).abs().max()) < 1e-6
    moved = elsewhere(own, experts=find_routers(model)[0].experts, k=2)
    unknown = replace(moved[5], routing=None)
    short = replace(moved[6], routing=moved[6].routing[:7])
    foreign = replace(moved[7], routing=moved[7].routing[:, :1])
    batch = [*moved[:5], unknown, short, foreign, *moved[8:]]
    found, table = logprobs(model, batch, replay=True), build_token_table(batch, CPU)
    for number, each in enumerate(batch):
        ids = torch.from_numpy(each.token_ids[None].astype(np.int64))
        routing = torch.full((ids.shape[1], 2, 2), -1)
        if each.group == "g1":
            routing[:3] = torch.from_numpy(batch[4].routing[:3].astype(np.int64))  # a shared prompt has one routing
        if each.routing is not None and each is not foreign:
            routing[: len(each.routing)] = torch.from_numpy(each.routing.astype(np.int64))
        with torch.no_grad(), replay_routing(model, routing):
            expected = model(input_ids=ids, use_cache=False).logits[0, :-1].log_softmax(-1)
        at = each.action_mask.nonzero()[0]
        picked = expected[at - 1, ids[0, at]]
        torch.testing.assert_close(found[table.experience == number], picked, atol=1e-5, rtol=0)
    assert float((found - logprobs(model, batch, replay=False)).abs().max()) > 0.3


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["qwen3_moe", "mixtral"])
def test_with_replay_the_bf16_gap_of_experts_is_that_of_a_dense_model(architecture: str) -> None:
    """An engine in bf16 and a trainer under bf16 autocast over fp32 weights choose other experts now and then."""
    dense, model = toy_model("qwen3", num_hidden_layers=4), toy_model(architecture, num_hidden_layers=4)
    usual = gap(dense, rolled_out(dense, dtype=torch.bfloat16, new=40), replay=False, bf16=True)
    batch = rolled_out(model, dtype=torch.bfloat16, new=40)
    jumps = gap(model, batch, replay=False, bf16=True)
    replayed = gap(model, batch, replay=True, bf16=True)
    assert jumps.max() > 0.4
    assert replayed.max() < 2 * usual.max() < 0.4
    assert replayed.mean() < 2 * usual.mean()


def step(model: Any, batch: list[Experience], **config: Any) -> tuple[dict[str, float], Tensor]:
    """Metrics of one step, and how the weights moved."""
    before = torch.cat([p.detach().flatten() for p in model.parameters()])
    settings = {"lr": 1e-3, "precision": "fp32", "betas": (0.0, 0.0), "eps": 1.0} | config
    recipe = build_recipe(GRPO(kl=KLOptions(coefficient=0.1)), max_new_tokens=40)
    trainer = Trainer(model, recipe, TrainerConfig(**settings), total_steps=10)
    metrics = trainer.step([copy.copy(each) for each in batch], version=0)
    return metrics, torch.cat([p.detach().flatten() for p in model.parameters()]) - before


def test_a_step_by_its_own_routing_is_the_step_without_replay() -> None:
    batch = rolled_out(toy_model("qwen3_moe"))
    metrics, moved = step(toy_model("qwen3_moe"), batch)
    plain, expected = step(toy_model("qwen3_moe"), batch, router_replay=False)
    torch.testing.assert_close(moved, expected, atol=1e-8, rtol=1e-4)
    assert metrics["logprob_gap/max"] < 1e-5
    assert metrics["kl_ref"] == pytest.approx(plain["kl_ref"], abs=1e-7)


def test_checkpointed_activations_and_recomputed_old_log_probs_replay_too() -> None:
    """By other experts than the model's own: the ratio of the first update is 1, and gradients are the same."""
    batch = elsewhere(rolled_out(toy_model("qwen3_moe")), experts=6, k=2)
    metrics, moved = step(toy_model("qwen3_moe"), batch)
    _, again = step(toy_model("qwen3_moe").train(), batch, gradient_checkpointing=True)
    torch.testing.assert_close(again, moved, atol=1e-9, rtol=1e-4)
    off, other = step(toy_model("qwen3_moe"), batch, router_replay=False)
    assert float((other - moved).norm() / moved.norm()) > 0.1
    for name in ("kl", "kl_ref"):  # neither the rollout nor the reference took these experts
        assert metrics[name] > 0.01
        assert off[name] < 1e-6


def test_adapters_and_their_merged_copy_take_the_same_experts(tmp_path: Path) -> None:
    folder = toy_checkpoint(tmp_path / "toy", "qwen3_moe")
    config = ModelConfig(path=folder, lora=LoRAConfig(rank=4, targets=["q_proj", "o_proj"]))
    model = load_policy(config, texts=[], seed=0, device=CPU).model
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.05)
    batch = rolled_out(model, dtype=torch.bfloat16, new=30)
    assert gap(model, batch, replay=True, bf16=True).max() < 0.2
    metrics, moved = step(model, batch, precision="bf16")
    assert metrics["logprob_gap/max"] < 0.2
    assert float(moved.norm()) > 0
