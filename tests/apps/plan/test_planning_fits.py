"""Fits, passes and sizes of caches, against what can be computed by hand."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.toys import toy_model

from rollmill.apps.plan.planning.measurement import EngineStep, record_engine_steps
from rollmill.apps.plan.planning.rollouts import (
    EngineStepCosts,
    GroupLengths,
    count_decode_steps,
    fit_line,
    fit_nonnegative,
    reserved_cache_tokens,
)
from rollmill.config.rollout import SamplingConfig
from rollmill.engines.base import GenerationRequest
from rollmill.engines.native import NativeEngine
from rollmill.engines.native.kv_cache import MIN_CAPACITY, BucketCache

POSITIVE = st.floats(0.1, 10.0)


@given(coefficients=st.lists(POSITIVE, min_size=1, max_size=3), seed=st.integers(0, 9))
def test_exact_values_are_found_again(coefficients: list[float], seed: int) -> None:
    rows = np.random.default_rng(seed).uniform(0.1, 1.0, (12, len(coefficients)))
    assert fit_nonnegative(rows.tolist(), (rows @ coefficients).tolist()) == pytest.approx(coefficients, rel=1e-5)


@given(values=st.lists(POSITIVE, min_size=3, max_size=8), seed=st.integers(0, 9))
def test_no_coefficient_is_negative_and_no_change_of_one_helps(values: list[float], seed: int) -> None:
    rows = np.random.default_rng(seed).uniform(0.0, 1.0, (len(values), 3))
    found = np.array(fit_nonnegative(rows.tolist(), values))
    assert (found >= 0).all()

    def error(coefficients: np.ndarray) -> float:
        return float((((rows @ coefficients - values) / np.array(values)) ** 2).sum())

    for column in range(3):
        for change in (-1e-3, 1e-3):
            moved = found.copy()
            moved[column] = max(0.0, moved[column] + change)
            assert error(moved) >= error(found) - 1e-9


def test_lines() -> None:
    assert fit_line([1, 2, 4], [3.0, 5.0, 9.0]) == pytest.approx((1.0, 2.0))
    assert fit_line([1, 2], [4.0, 2.0])[1] == 0.0  # more work takes no less
    assert fit_line([2, 2], [4.0, 8.0]) == (0.0, 3.0)
    assert fit_line([0, 0], [4.0, 8.0]) == (6.0, 0.0)


def test_passes_that_were_disturbed_are_left_out() -> None:
    costs = EngineStepCosts(1e-3, 1e-4, 1e-7, 1e-5)

    def measured(tokens: int, attended: int, prompt: int) -> EngineStep:
        seconds = costs.step + costs.token * tokens + costs.attended * attended + costs.prompt * prompt
        return EngineStep(seconds, tokens, attended, prompt)

    source = np.random.default_rng(0)
    passes = [measured(*map(int, source.integers(1, [64, 4096, 256]))) for _ in range(40)]
    passes[7] = EngineStep(9.0, 8, 100, 0)
    found = EngineStepCosts.fitted(passes)
    assert found.step == pytest.approx(costs.step, rel=1e-3)
    assert found.token == pytest.approx(costs.token, rel=1e-3)
    groups = [GroupLengths(10, [3, 5]), GroupLengths(20, [4, 2])]
    attended = 10 * 8 + 20 * 6 + (9 + 25 + 16 + 4) / 2
    expected = 5 * costs.step + 14 * costs.token + attended * costs.attended + 30 * costs.prompt
    assert costs.seconds(groups, 256) == pytest.approx(expected)


@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=30), together=st.integers(1, 8))
def test_the_number_of_passes(lengths: list[int], together: int) -> None:
    found = count_decode_steps(lengths, together)
    least = max(max(lengths), -(-sum(lengths) // together))
    assert least <= found <= least + max(lengths)  # Graham 1966
    assert count_decode_steps(lengths, len(lengths)) == max(lengths)
    assert count_decode_steps(lengths, 1) == sum(lengths)


def test_a_long_prompt_does_not_reserve_room_for_others() -> None:
    cache, keys = BucketCache(), torch.zeros(1, 1, 1, 4)
    entries = [cache.prompt(length) for length in (20, 30_000, 30_000, 30_000)]
    room = [len(entry.bucket.layer(0, keys, keys)[0]) for entry in entries]
    assert room == [8, 4, 4, 4]
    groups = [GroupLengths(length, [1]) for length in (20, 30_000, 30_000, 30_000)]
    assert cache.bytes() == 2 * 4 * 4 * (reserved_cache_tokens(groups, 4) - 4 * MIN_CAPACITY)


@pytest.mark.parametrize("together", [6, 256])
def test_the_cache_and_the_passes_are_those_of_the_engine(together: int) -> None:
    model = toy_model("qwen3")
    engine = NativeEngine(model, None, context=128, max_sequences=together)
    asked = [(10, 3, 70), (40, 3, 20), (5, 3, 40)]

    async def run() -> None:
        sampling = [SamplingConfig(max_new_tokens=tokens) for _, _, tokens in asked]
        requests = [
            GenerationRequest(prompt_ids=[1] * prompt, sampling=each, n=n, seed=1)
            for (prompt, n, _), each in zip(asked, sampling, strict=True)
        ]
        await asyncio.gather(*(engine.generate(each) for each in requests))

    with record_engine_steps(engine) as passes:
        asyncio.run(run())
    groups = [GroupLengths(prompt, [tokens] * n) for prompt, n, tokens in asked]
    config = model.config
    heads, size = config.num_key_value_heads, config.head_dim
    token = 2 * config.num_hidden_layers * heads * size * torch.float32.itemsize
    assert sum(each.tokens for each in passes) == sum(sum(group.lengths) for group in groups)
    assert sum(each.prompt for each in passes) == sum(group.prompt for group in groups)
    lengths = [length for group in groups for length in group.lengths]
    assert len(passes) == pytest.approx(count_decode_steps(lengths, together), abs=4)
    assert engine.core.cache_bytes() <= 1.01 * token * reserved_cache_tokens(groups, together)
    assert engine.core.cache_bytes() >= 0.5 * token * reserved_cache_tokens(groups, together)
