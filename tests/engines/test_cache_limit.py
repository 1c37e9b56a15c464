"""With a limit of the KV cache, completions that do not fit wait, and continue as if they had not."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.toys import toy_model

from bench.tiny_architectures import tiny_model
from rollmill.config.rollout import NgramConfig, SamplingConfig
from rollmill.engines.base import GenerationRequest
from rollmill.engines.native import NativeEngine
from rollmill.engines.native.kv_cache import BucketCache, CacheFull
from rollmill.errors import EngineError
from rollmill.orchestrator.metrics import generation_metrics
from rollmill.types import Completion

VOCAB = 31
MODELS: dict[str, dict[str, Any]] = {"qwen3": {}, "gemma2": {"sliding_window": 16}, "lfm2": {}}


def model_of(architecture: str) -> Any:
    if architecture == "lfm2":  # has recurrent layers
        return tiny_model(architecture)
    return toy_model(architecture, vocab_size=VOCAB, **MODELS[architecture])


def engine_of(model: Any, tokens: int | None = None, **options: Any) -> NativeEngine:
    """An engine whose cache holds so many tokens."""
    options = {"context": 256, "max_sequences": 12, "prefill_tokens": 64} | options
    if tokens is not None:
        options["cache_gb"] = tokens * token_bytes(model) / 2**30
    return NativeEngine(model, **options)


def token_bytes(model: Any) -> int:
    cache = NativeEngine(model, context=256, cache_gb=1.0).core._cache
    assert isinstance(cache, BucketCache)
    return cache._token_bytes


def requests_of(count: int, new_tokens: int = 60, n: int = 3, **sampling: Any) -> list[GenerationRequest]:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, VOCAB, length).tolist() for length in rng.integers(5, 60, count)]
    chosen = SamplingConfig(max_new_tokens=new_tokens, **sampling)
    return [GenerationRequest(prompt, chosen, n=n, seed=seed) for seed, prompt in enumerate(prompts)]


def serve(engine: NativeEngine, requests: list[GenerationRequest], updates: int = 0) -> list[Completion]:
    """All completions; new weights, which are the old ones, arrive in every 20th step, so many times."""

    async def run() -> list[list[Completion]]:
        steps = 0
        step = engine.core.step

        def counting() -> None:
            nonlocal steps
            steps += 1
            assert steps < 3000, "no progress"
            if steps % 20 == 0 and steps <= 20 * updates:
                engine.weights_updated(steps)
            step()

        engine.core.step = counting  # type: ignore[method-assign]
        return await asyncio.gather(*map(engine.generate, requests))

    return [each for group in asyncio.run(run()) for each in group]


def assert_same(found: list[Completion], expected: list[Completion]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=2e-5)


@pytest.mark.parametrize("updates", [0, 3])
@pytest.mark.parametrize("architecture", list(MODELS))
def test_completions_that_waited_for_memory_are_the_same(architecture: str, updates: int) -> None:
    model = model_of(architecture)
    expected = serve(engine_of(model), requests_of(8))
    engine = engine_of(model, 500)
    assert_same(serve(engine, requests_of(8), updates), expected)
    core = engine.core
    assert core.preemptions > 0
    assert core._cache.limit is not None
    assert 0.5 * core._cache.limit < core.cache_peak <= core._cache.limit
    assert core.cached_entries == core._cache.used == 0


def test_the_memory_stays_below_the_limit() -> None:
    model = model_of("qwen3")
    engine = engine_of(model, 500)
    most, step = 0, engine.core.step

    def watched() -> None:
        nonlocal most
        step()
        most = max(most, engine.core.cache_bytes())

    engine.core.step = watched  # type: ignore[method-assign]
    serve(engine, requests_of(8))
    assert 0.8 * 500 * token_bytes(model) < most <= 500 * token_bytes(model)
    metrics = generation_metrics({}, engine.counters(), engine.tokens_generated)
    assert metrics["rollout/cache/preemptions"] == engine.core.preemptions > 0
    assert metrics["rollout/cache/peak_gb"] == engine.core.cache_peak / 2**30
    assert "rollout/cache/peak_gb" not in generation_metrics({}, engine_of(model).counters(), 1)


def test_the_oldest_completions_go_on() -> None:
    """Those that wait start again when one has ended, not earlier: each is computed again a few times at most."""
    engine = engine_of(model_of("qwen3"), 300)
    requests = requests_of(6, n=2)
    ended: list[int] = []

    async def one(number: int) -> None:
        await engine.generate(requests[number])
        ended.append(number)

    async def run() -> None:
        await asyncio.gather(*map(one, range(len(requests))))

    asyncio.run(run())
    assert ended == sorted(ended)
    assert 0 < engine.core.preemptions < 12


@pytest.mark.parametrize("sampling", [{"ngram_draft": NgramConfig(length=2, tokens=8), "temperature": 0.3}])
def test_guesses_that_waited_for_memory_are_the_same(sampling: dict[str, Any]) -> None:
    model = model_of("qwen3")
    expected = serve(engine_of(model), requests_of(8, **sampling))
    engine = engine_of(model, 450)
    assert_same(serve(engine, requests_of(8, **sampling)), expected)
    assert engine.core.preemptions > 0
    assert engine.core.drafting.counts.guess_accepted > 0


def test_finished_turns_give_way() -> None:
    """They are the first to go, and are computed again."""
    model = model_of("qwen3")

    async def talk(engine: NativeEngine, number: int) -> list[list[int]]:
        tokens, found = [3 + number, 7, 9], []
        for turn in range(6):
            request = GenerationRequest(tokens, SamplingConfig(max_new_tokens=20), seed=number + turn, continues=True)
            [completion] = await engine.generate(request)
            found.append(completion.token_ids.tolist())
            tokens = [*tokens, *found[-1], 4, 5]
        return found

    async def run(engine: NativeEngine) -> list[list[list[int]]]:
        return await asyncio.gather(*(talk(engine, number) for number in range(4)))

    engine = engine_of(model, 520)
    assert asyncio.run(run(engine)) == asyncio.run(run(engine_of(model)))
    assert engine.core.prefixes.hits > 0
    assert engine.core.cache_bytes() <= 520 * token_bytes(model)


@given(
    tokens=st.integers(190, 700),
    prefill=st.integers(8, 80),
    lengths=st.lists(st.tuples(st.integers(1, 90), st.integers(1, 3), st.integers(1, 60)), min_size=1, max_size=6),
    updates=st.integers(0, 2),
    turns=st.booleans(),
)
@settings(max_examples=6, deadline=None)
def test_every_request_is_served(
    tokens: int, prefill: int, lengths: list[tuple[int, int, int]], updates: int, turns: bool
) -> None:
    model = model_of("qwen3")
    requests = [
        GenerationRequest([3 + i] * prompt, SamplingConfig(max_new_tokens=new), n=n, seed=i, continues=turns)
        for i, (prompt, n, new) in enumerate(lengths)
    ]
    engine = engine_of(model, tokens, prefill_tokens=prefill)
    found = serve(engine, requests, updates)
    assert_same(found, serve(engine_of(model, prefill_tokens=prefill), requests))
    engine.core.prefixes.clear()
    assert engine.core.cached_entries == engine.core._cache.used == 0


def test_a_completion_that_fits_nowhere_names_the_keys() -> None:
    """The others are not disturbed."""
    model = model_of("qwen3")
    engine = engine_of(model, 128)
    [short] = requests_of(1, 20, n=1)

    async def run() -> tuple[Any, Any, Any]:
        long = GenerationRequest([5] * 10, SamplingConfig(max_new_tokens=200), id="long")
        prompt = GenerationRequest([5] * 200, SamplingConfig(max_new_tokens=2), id="prompt")
        return await asyncio.gather(*map(engine.generate, (long, short, prompt)), return_exceptions=True)  # type: ignore[return-value]

    long, [found], prompt = asyncio.run(run())
    for name, error in (("long", long), ("prompt", prompt)):
        assert isinstance(error, EngineError)
        assert all(word in str(error) for word in (name, "engine.cache_gb", "max_new_tokens"))
    assert_same([found], serve(engine_of(model), [short]))
    assert engine.core.cached_entries == engine.core._cache.used == 0


def test_a_cache_that_is_full_changes_nothing() -> None:
    cache = BucketCache(limit=64 * 8, token_bytes=8)
    prompt = cache.prompt(20)
    prompt.length = 20
    [entry] = cache.completions([prompt])
    entry.length = 32
    for too_much in (lambda: cache.prompt(1), lambda: cache.completions([prompt]), lambda: cache.reserve([entry], [1])):
        with pytest.raises(CacheFull):
            too_much()
    assert (cache.used, cache.entries()) == (64 * 8, 2)
    assert cache.fitting([prompt], [1]) == 0
    cache.remove([entry])
    assert cache.fitting([prompt, prompt], [1, 1]) == 1
