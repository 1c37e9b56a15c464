"""The native engine on a CUDA device draws what it draws on a CPU, and attention takes a kernel that the GPU has."""

from __future__ import annotations

import asyncio
import logging
import os
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from support.engine_gaps import experiences_of, rolled_out, trained_gaps
from support.simulated_cuda.trace import Trace
from support.toys import toy_model

from bench.tiny_architectures import VOCABULARY, tiny_model
from rollmill.config.rollout import SamplingConfig
from rollmill.engines.base import GenerationRequest
from rollmill.engines.native import NativeEngine, paged_cache
from rollmill.engines.native.decoder import CAPTURE_AFTER
from rollmill.engines.native.paged_cache import PagedCache
from rollmill.models import attention
from rollmill.types import Completion, Experience

pytestmark = pytest.mark.gpu

SIMULATED = os.environ.get("SIMULATED_CUDA") == "1"
GAP = 0.08  # of a completion's mean log-prob, in nats: engine and trainer both compute in bf16
PAGE_GB = 256 * 2 * 2 * 2 * 16 * 2 / 2**30  # tokens, layers, keys and values, heads, sizes of heads and numbers
TRUNCATED = {"temperature": 0.8, "top_p": 0.9, "top_k": 20}


@pytest.mark.parametrize("sampling", [{}, TRUNCATED], ids=["plain", "truncated"])
def test_tokens_are_those_that_a_cpu_draws(sampling: dict[str, Any]) -> None:
    """In fp32, through a change of the cache's bucket, captured steps on one side and exact shapes on the other."""
    found = {}
    for device in ("cpu", "cuda"):
        model = toy_model("qwen3").to(device)
        found[device], counts = rolled_out(model, vocabulary=130, new_tokens=45, dtype=torch.float32, **sampling)
        assert bool(counts["decode_replays"]) == (device == "cuda")
    for here, there in zip(found["cpu"], found["cuda"], strict=True):
        assert here.token_ids.tolist() == there.token_ids.tolist()
        assert there.logprobs == pytest.approx(here.logprobs, abs=1e-4)


def test_a_model_that_waits_for_the_device_is_decoded_without_captures(caplog: pytest.LogCaptureFixture) -> None:
    model = toy_model("qwen3").cuda()
    expected, _ = rolled_out(model, vocabulary=130, new_tokens=30, dtype=torch.float32)
    model.lm_head.register_forward_hook(lambda module, given, found: float(found.sum()) and None)
    with caplog.at_level(logging.WARNING, "rollmill"):
        found, counts = rolled_out(model, vocabulary=130, new_tokens=30, dtype=torch.float32)
    assert [each.token_ids.tolist() for each in found] == [each.token_ids.tolist() for each in expected]
    assert (counts["decode_replays"], counts["decode_captures"]) == (0, 1)  # tried once
    assert "cannot be captured" in caplog.text


async def all_of(engine: NativeEngine, requests: list[GenerationRequest]) -> list[list[Completion]]:
    return await asyncio.gather(*map(engine.generate, requests))


def in_pages(model: Any, **options: Any) -> tuple[list[Experience], NativeEngine]:
    """Completions in bf16 whose tokens lie in up to three pages; more rows than start at once, and one alone."""
    engine = NativeEngine(model, context=1024, prefill_tokens=200, max_sequences=7, **options)
    engine.weights_updated(0)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 129, length).tolist() for length in (250, 512, 30, 509, 256)]
    requests = [
        GenerationRequest(prompt, SamplingConfig(max_new_tokens=12 + 9 * seed), n=n, seed=seed)
        for seed, (prompt, n) in enumerate(zip(prompts, (3, 2, 3, 1, 3), strict=True))
    ]
    found = experiences_of(asyncio.run(all_of(engine, requests)))
    assert engine.core.cached_entries == engine.core._cache.used == 0
    return found, engine


def largest_gap(model: Any, experiences: list[Experience]) -> float:
    """Of the completions' mean differences between the trainer's log-probs and the engine's."""
    gaps, at, means = trained_gaps(model, experiences), 0, []
    for each in experiences:
        means.append(float(gaps[at : at + int(each.action_mask.sum())].mean()))
        at += int(each.action_mask.sum())
    assert at == len(gaps)
    return max(means)


@pytest.mark.parametrize("sizes", [{}, {"num_key_value_heads": 4}], ids=["shared heads", "own heads"])
def test_completions_in_pages(sizes: dict[str, Any]) -> None:
    model = toy_model("qwen3", max_position_embeddings=1024, **sizes).cuda()
    experiences, engine = in_pages(model, dtype=torch.bfloat16)
    assert isinstance(engine.core._cache, PagedCache)
    counts = engine.counters()
    assert counts["decode_captures"] == 1
    assert counts["decode_replays"] == counts["decode_steps"] - CAPTURE_AFTER
    assert largest_gap(model, experiences) < GAP


def test_completions_in_pages_that_waited_for_memory() -> None:
    model = toy_model("qwen3", max_position_embeddings=1024).cuda()
    experiences, engine = in_pages(model, dtype=torch.bfloat16, cache_gb=9.5 * PAGE_GB)
    assert engine.core.preemptions > 0
    assert engine.core.cache_peak == pytest.approx(9 * PAGE_GB * 2**30)
    assert largest_gap(model, experiences) < GAP


@pytest.mark.parametrize("keep", [False, True], ids=["recompute", "keep"])
@pytest.mark.parametrize("pages", [None, 9.5])
def test_new_weights_for_completions_in_pages(keep: bool, pages: float | None) -> None:
    """They are the old ones, so that log-probs are those of the trainer."""
    model = toy_model("qwen3", max_position_embeddings=1024).cuda()
    engine = NativeEngine(
        model,
        context=1024,
        dtype=torch.bfloat16,
        keep=keep,
        max_sequences=7,
        cache_gb=None if pages is None else pages * PAGE_GB,
    )
    engine.weights_updated(0)
    step, steps = engine.core.step, 0

    def updating() -> None:
        nonlocal steps
        steps += 1
        if steps % 12 == 0:
            engine.weights_updated(steps)
        step()

    engine.core.step = updating  # type: ignore[method-assign]
    requests = [
        GenerationRequest([7 + n] * length, SamplingConfig(max_new_tokens=40), n=3, seed=n)
        for n, length in enumerate((250, 300, 30))
    ]
    found = experiences_of(asyncio.run(all_of(engine, requests)))
    assert len({version for each in found for version in each.versions.tolist()}) > 3
    assert engine.core.cached_entries == engine.core._cache.used == 0
    assert largest_gap(model, found) < GAP


@pytest.mark.parametrize("pages", [None, 7.5])
def test_conversations_in_pages(pages: float | None) -> None:
    """The next turn goes on in the pages of the last one; equal conversations share them."""
    model = toy_model("qwen3", max_position_embeddings=1024).cuda()
    limit = None if pages is None else pages * PAGE_GB
    engine = NativeEngine(model, context=1024, dtype=torch.bfloat16, cache_gb=limit)
    engine.weights_updated(0)
    found: list[list[Completion]] = []

    async def talk(number: int) -> None:
        tokens = [3 + number % 3] * 200
        for turn in range(4):
            sampling = SamplingConfig(max_new_tokens=30)
            request = GenerationRequest(list(tokens), sampling, seed=number % 3 + turn, continues=True)
            found.append(await engine.generate(request))
            tokens = [*tokens, *found[-1][0].token_ids.tolist(), 7 + number, 9]

    async def all_of_them() -> None:
        await asyncio.gather(*map(talk, range(5)))

    asyncio.run(all_of_them())
    assert engine.core.prefixes.hits > (5 * 3 * 200 if pages is None else 200)
    engine.core.prefixes.clear()
    assert engine.core.cached_entries == engine.core._cache.used == 0
    assert largest_gap(model, experiences_of(found)) < GAP


@pytest.mark.parametrize("rows", [1, 3])
def test_rows_that_fill_up_the_batch_change_nothing(rows: int) -> None:
    model = toy_model("qwen3").cuda()
    engine = NativeEngine(model, context=128, dtype=torch.bfloat16)
    request = GenerationRequest([57], SamplingConfig(max_new_tokens=30), n=rows)
    assert largest_gap(model, experiences_of([asyncio.run(engine.generate(request))])) < GAP


def test_captured_steps_follow_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """It grows while they are replayed, and is freed between two uses."""
    monkeypatch.setattr(paged_cache, "FIRST_PAGES", 5)  # one for each prompt, until token 256
    model = toy_model("qwen3", max_position_embeddings=512).cuda()
    engine = NativeEngine(model, context=512, dtype=torch.bfloat16)
    for version in range(2):
        engine.weights_updated(version)
        requests = [GenerationRequest([3 + n] * 240, SamplingConfig(max_new_tokens=40), seed=n) for n in range(4)]
        assert largest_gap(model, experiences_of(asyncio.run(all_of(engine, requests)))) < GAP
        engine.core.destroy_cache()
        assert engine.core.cache_bytes() == 0
    assert engine.counters()["decode_captures"] == 3  # the second time it begins with the memory of the first


def test_captured_steps_follow_the_weights() -> None:
    """Each update rounds them anew in their place, unless their memory was freed."""
    model = toy_model("qwen3").cuda()
    engine = NativeEngine(model, context=128, dtype=torch.bfloat16)
    captures = []
    for version in range(4):
        for parameter in model.parameters():
            parameter.data.mul_(1.1)
        if version % 2:
            engine.core.destroy_weights()
        engine.weights_updated(version)
        request = GenerationRequest([5, 9, 2], SamplingConfig(max_new_tokens=40), n=4)
        assert largest_gap(model, experiences_of([asyncio.run(engine.generate(request))])) < GAP
        captures.append(engine.counters()["decode_captures"])
    assert captures == [1, 2, 2, 3]


def require_agreement(model: Any, vocabulary: int = 130, *, flash: bool) -> None:
    """Prefill and training agree, and attend by the flash kernel or without it, which the simulated device counts."""
    with Trace() if SIMULATED else nullcontext() as trace:
        experiences, _ = rolled_out(model.cuda(), vocabulary=vocabulary, new_tokens=4)
        gaps = trained_gaps(model, experiences)
    assert float(gaps.mean()) < 0.05  # both compute in bf16
    if trace is not None:
        assert flash == any("flash" in name or "varlen" in name for name in trace.ops)


def test_attention_by_the_flash_kernel() -> None:
    require_agreement(toy_model("qwen3"), flash=True)


def test_a_kernel_that_takes_no_groups_of_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in torch 2.11."""
    kernel = attention.varlen_attn

    def without_groups(
        query: Any, key: Any, value: Any, cu_seq_q: Any, cu_seq_k: Any, max_q: int, max_k: int, *,
        scale: float | None = None, window_size: tuple[int, int] = (-1, -1),
    ) -> Any:  # fmt: skip
        assert query.shape[1] == key.shape[1] == value.shape[1]
        return kernel(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale=scale, window_size=window_size)

    monkeypatch.setattr(attention, "varlen_attn", without_groups)
    require_agreement(toy_model("qwen3"), flash=True)


@pytest.mark.parametrize("size", [20, 264])
def test_head_sizes_that_the_flash_kernel_lacks(size: int) -> None:
    """It takes multiples of 8 up to 256."""
    require_agreement(toy_model("qwen3", head_dim=size, num_hidden_layers=1), flash=False)


def test_heads_whose_values_have_another_size() -> None:
    """As in multi-head latent attention."""
    require_agreement(tiny_model("deepseek_v3"), VOCABULARY, flash=False)


def test_a_gpu_before_ampere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The flash kernel refuses it."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    require_agreement(toy_model("qwen3"), flash=False)


def test_decay_rates_that_are_buffers_follow_the_weights() -> None:
    """MiniMax multiplies them with activations, which are in bf16, in one product."""
    model = tiny_model("minimax").cuda()
    experiences, _ = rolled_out(model, vocabulary=VOCABULARY, new_tokens=12)
    assert float(trained_gaps(model, experiences).mean()) < 0.05
