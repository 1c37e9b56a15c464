"""The next turn of a conversation starts from the keys and values of the last one."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.toys import toy_model

from bench.tiny_architectures import tiny_model
from rollmill.config.rollout import SamplingConfig
from rollmill.engines.base import GenerationRequest
from rollmill.engines.native import NativeEngine
from rollmill.types import Completion

VOCAB = 31
MODELS = {
    "qwen3": {},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "gemma2": {"sliding_window": 16},
    "lfm2": {},  # has recurrent layers
}


def _engine(model: Any, **options: Any) -> NativeEngine:
    return NativeEngine(model, **({"context": 256, "max_sequences": 7, "prefill_tokens": 24} | options))


async def _talk(engine: NativeEngine, start: list[int], seed: int, turns: int, **settings: Any) -> list[Completion]:
    """A conversation: after each turn of at most 9 tokens the other side says three more."""
    tokens, found = list(start), []
    for turn in range(turns):
        sampling = SamplingConfig(temperature=0.9, max_new_tokens=9, **settings)
        request = GenerationRequest(list(tokens), sampling, seed=seed + turn, continues=True)
        [completion] = await engine.generate(request)
        found.append(completion)
        tokens = [*tokens, *completion.token_ids.tolist(), 3, 5 + turn, 4]
    return found


async def _all(engine: NativeEngine, count: int, turns: int, **settings: Any) -> list[list[Completion]]:
    starts = [[2 + i % 4, 7, *range(8, 8 + 5 * (i % 4))] for i in range(count)]  # some of them equal
    talks = [_talk(engine, start, 100 * (i % 4), turns, **settings) for i, start in enumerate(starts)]
    return list(await asyncio.gather(*talks))


def _assert_same(found: list[list[Completion]], expected: list[list[Completion]]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert one.token_ids.tolist() == other.token_ids.tolist()
            np.testing.assert_allclose(one.logprobs, other.logprobs, atol=2e-5)
            if one.routing is not None:
                np.testing.assert_array_equal(one.routing, other.routing)


@pytest.mark.parametrize("architecture", list(MODELS))
def test_turns_are_those_of_an_engine_that_computes_everything(architecture: str) -> None:
    """Tokens, log-probs and experts are the same, and only new tokens pass through the model."""
    model = tiny_model("lfm2") if architecture == "lfm2" else toy_model(architecture, VOCAB, **MODELS[architecture])
    options = {"record_routing": True} if architecture == "qwen3_moe" else {}
    cached, plain = _engine(model, **options), _engine(model, prefix_cache_bytes=0, **options)
    _assert_same(asyncio.run(_all(cached, 9, 4)), asyncio.run(_all(plain, 9, 4)))
    hits, queries = (cached.counters()[f"prefix_cache_{name}"] for name in ("hits", "queries"))
    talks = asyncio.run(_all(plain, 9, 4))
    known = sum(len(c.prompt_ids) - 4 for talk in talks for c in talk[1:])  # all but the last token and the answer
    assert hits == known
    assert queries == sum(len(c.prompt_ids) for talk in talks for c in talk)
    assert plain.counters()["prefix_cache_hits"] == 0


@pytest.mark.slow
@settings(max_examples=8)
@given(st.integers(0, 60_000), st.integers(1, 9), st.integers(1, 5), st.sampled_from([None, "ab"]))
def test_any_amount_of_memory_gives_the_same_turns(capacity: int, count: int, turns: int, stop: str | None) -> None:
    """What does not fit is computed again."""
    model = _MODEL
    cached = _engine(model, prefix_cache_bytes=capacity)
    changes: dict[str, Any] = {} if stop is None else {"stop_token_ids": [9, 12]}
    found = asyncio.run(_all(cached, count, turns, **changes))
    _assert_same(found, asyncio.run(_all(_engine(model, prefix_cache_bytes=0), count, turns, **changes)))
    assert cached.core.prefixes.size <= capacity


_MODEL = toy_model("qwen3", vocab_size=VOCAB)


@pytest.mark.parametrize("keep", [False, True])
def test_new_weights_forget_what_older_ones_computed(keep: bool) -> None:
    """A turn after an update is that of an engine with the new weights from the start."""
    model, new = (toy_model("qwen3", vocab_size=VOCAB, seed=seed) for seed in (0, 1))

    async def turns() -> Completion:
        engine = _engine(model, keep=keep)
        [first] = await _talk(engine, [2, 7, 8], 0, 1)
        assert engine.core.prefixes.size > 0
        model.load_state_dict(new.state_dict())
        engine.weights_updated(1)
        request = GenerationRequest([2, 7, 8, *first.token_ids.tolist(), 3], SamplingConfig(max_new_tokens=9), seed=5)
        [second] = await engine.generate(request)
        assert engine.counters()["prefix_cache_hits"] == 0
        fresh = _engine(new)
        [expected] = await fresh.generate(request)
        np.testing.assert_allclose(second.logprobs, expected.logprobs, atol=2e-5)
        return second

    assert asyncio.run(turns()).versions.tolist() == [1] * 9


def test_freeing_the_cache_frees_kept_turns() -> None:
    engine = _engine(_MODEL)
    asyncio.run(_talk(engine, [2, 7, 8], 0, 1))
    assert engine.core.cache_bytes() > engine.core.prefixes.size > 0
    engine.core.destroy_cache()
    assert engine.core.cache_bytes() == 0


def test_turns_of_many_conversations_share_passes() -> None:
    """While no completion is running, the engine waits for the other conversations' next turns."""
    steps = 0

    async def play() -> None:
        nonlocal steps
        engine = _engine(_MODEL, max_sequences=64, prefill_tokens=2048)
        step = engine.core.step

        def counted() -> None:
            nonlocal steps
            steps += 1
            step()

        engine.core.step = counted  # type: ignore[method-assign]

        async def talk(number: int) -> None:
            tokens = [2, 7, 8 + number % 20]
            for turn in range(6):
                request = GenerationRequest(tokens, SamplingConfig(max_new_tokens=1), seed=number, continues=True)
                [completion] = await engine.generate(request)
                for _ in range(number % 5):  # some workflows take longer
                    await asyncio.sleep(0)
                tokens = [*tokens, *completion.token_ids.tolist(), turn]

        await asyncio.gather(*(talk(i) for i in range(40)))

    asyncio.run(play())
    assert steps == 6
