"""Completions of the native engine as batches, and how far the trainer's log-probs of their tokens are from its own."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rollmill.config.rollout import SamplingConfig
from rollmill.engines.base import GenerationRequest
from rollmill.engines.native import NativeEngine
from rollmill.models.routing import routing_shape
from rollmill.trainer.batch import build_micro_batches, build_token_table
from rollmill.trainer.logprobs import compute_logprobs, use_packed_attention
from rollmill.trainer.model_setup import evaluation_mode
from rollmill.types import Completion, Experience, experience_from_completion


def rolled_out(
    model: Any, *, vocabulary: int, new_tokens: int, dtype: torch.dtype = torch.bfloat16, **sampling: Any
) -> tuple[list[Experience], dict[str, int]]:
    """Two completions of each of two prompts, which are prefilled in chunks, and the engine's counts."""
    routed = routing_shape(model) is not None
    engine = NativeEngine(model, context=128, dtype=dtype, prefill_tokens=16, record_routing=routed)
    engine.weights_updated(0)
    rng = np.random.default_rng(0)
    options = SamplingConfig(max_new_tokens=new_tokens, **sampling)
    prompts = [rng.integers(3, vocabulary - 1, length).tolist() for length in (21, 9)]

    async def all_of_them() -> list[Any]:
        requests = [GenerationRequest(prompt, options, n=2, seed=seed) for seed, prompt in enumerate(prompts)]
        return await asyncio.gather(*map(engine.generate, requests))

    return experiences_of(asyncio.run(all_of_them())), engine.counters()


def scored_batch(model: Any) -> list[Experience]:
    """64 completions of 8 prompts, with rewards that differ."""
    running = NativeEngine(model, context=256, dtype=torch.bfloat16)
    running.weights_updated(0)
    sampling = SamplingConfig(max_new_tokens=20)

    async def all_of_them() -> list[Any]:
        requests = [GenerationRequest(list(range(8, 18 + each)), sampling, n=8, seed=each) for each in range(8)]
        return await asyncio.gather(*map(running.generate, requests))

    made = experiences_of(asyncio.run(all_of_them()))
    for number, each in enumerate(made):
        each.reward = float(np.random.default_rng(number % 8 + 10 * (number // 8)).random() > 0.5)
    return made


def experiences_of(groups: list[list[Completion]]) -> list[Experience]:
    """One experience for each completion of each group."""
    found = []
    for group, completions in enumerate(groups):
        for each in completions:
            name = {"id": f"{group}/{each.index}", "task_id": f"t{group}", "group": str(group), "prompt": "p"}
            found.append(experience_from_completion(each, **name, temperature=1.0))
    return found


def trained_gaps(model: Any, experiences: list[Experience]) -> Tensor:
    """Make the trainer's passes in bf16, forward and backward; |its log-prob - the engine's| of each token."""
    device = next(model.parameters()).device
    table = build_token_table(experiences, device)
    found = torch.zeros(len(table.target), device=device)
    routing = routing_shape(model)
    with evaluation_mode(model):
        for micro in build_micro_batches(experiences, table, range(len(experiences)), 64, device, routing=routing):
            with use_packed_attention(model, micro, replay=True):
                logprob, _ = compute_logprobs(model, micro, table, bf16=True)
                found[micro.tokens] = logprob.detach().float()
                logprob.sum().backward()
    return (found - table.rollout_logprob).abs().cpu()
