"""Completions that are interrupted, and begun again with the tokens they had."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.toys import toy_model, toy_tokenizer

from rollmill.config.rollout import SamplingConfig
from rollmill.engines.base import CompletionPrefix, GenerationRequest
from rollmill.engines.native import NativeEngine
from rollmill.types import Completion, StopReason

TOKENIZER = toy_tokenizer("char")
VOCAB = len(TOKENIZER)
MODEL = toy_model("qwen3", vocab_size=VOCAB)
TEXT = " ".join(str(n) for n in range(40))
PROMPTS = [TOKENIZER.encode(TEXT[:length], add_special_tokens=False) for length in (3, 20, 41, 9)]
SAMPLING = SamplingConfig(temperature=0.9, top_p=0.95, max_new_tokens=30, stop=["ab", "!"], stop_token_ids=[9])


def engine_of(**options: Any) -> NativeEngine:
    return NativeEngine(MODEL, TOKENIZER, **({"context": 256, "max_sequences": 5, "prefill_tokens": 16} | options))


def requests_of(sampling: SamplingConfig = SAMPLING) -> list[GenerationRequest]:
    return [GenerationRequest(prompt, sampling, n=3, seed=50 + i) for i, prompt in enumerate(PROMPTS)]


def begun(completion: Completion, cut: int | None = None) -> CompletionPrefix:
    each = completion
    return CompletionPrefix(each.token_ids[:cut], each.logprobs[:cut], each.kept_logmass[:cut], each.versions[:cut])


async def all_of(engine: NativeEngine, requests: list[GenerationRequest]) -> list[list[Completion]]:
    return list(await asyncio.gather(*map(engine.generate, requests)))


async def until(engine: NativeEngine, tokens: int, requests: list[GenerationRequest]) -> list[list[Completion]]:
    """What there is once so many tokens more were generated, or everything has ended."""
    work, end = asyncio.ensure_future(all_of(engine, requests)), engine.tokens_generated + tokens
    for _ in range(4):  # until the engine has all requests
        await asyncio.sleep(0)
    while not work.done() and engine.tokens_generated < end:
        await asyncio.sleep(0)
    engine.interrupt()
    return await work


def assert_same(found: Completion, expected: Completion) -> None:
    """Equal tokens, texts and ends; log-probs up to the rounding of a pass over several tokens."""
    assert found.token_ids.tolist() == expected.token_ids.tolist()
    assert (found.text, found.stop_reason, found.seed) == (expected.text, expected.stop_reason, expected.seed)
    np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=1e-5)
    np.testing.assert_allclose(found.kept_logmass, expected.kept_logmass, atol=1e-5)


@pytest.fixture(scope="module")
def undisturbed() -> list[list[Completion]]:
    return asyncio.run(all_of(engine_of(), requests_of()))


@pytest.mark.slow
@given(st.lists(st.integers(0, 60), min_size=1, max_size=3), st.integers(1, 12))
@settings(max_examples=8, deadline=None)
def test_interrupted_again_and_again_equals_undisturbed(
    undisturbed: list[list[Completion]], budgets: list[int], places: int
) -> None:
    async def main() -> list[list[Completion]]:
        engine, requests = engine_of(max_sequences=places), requests_of()
        for budget in [*budgets, None]:
            groups = await (all_of(engine, requests) if budget is None else until(engine, budget, requests))
            assert [[c.index for c in group] for group in groups] == [[0, 1, 2]] * len(requests)
            requests = [
                replace(request, prefixes=[begun(each) for each in group])
                for request, group in zip(requests, groups, strict=True)
            ]
            assert engine.core.cached_entries == 0
        return groups

    for group, expected in zip(asyncio.run(main()), undisturbed, strict=True):
        for each, other in zip(group, expected, strict=True):
            assert_same(each, other)


def test_what_a_completion_is_begun_with_is_kept_to_the_bit(undisturbed: list[list[Completion]]) -> None:
    earlier = undisturbed[2][0]
    cut = len(earlier.token_ids) // 2
    kept = replace(begun(earlier, cut), logprobs=np.full(cut, -0.3, np.float32), versions=np.full(cut, 4, np.int32))
    engine = engine_of()
    engine.weights_updated(6)
    request = replace(requests_of()[2], prefixes=[kept])
    first, second, _ = asyncio.run(engine.generate(request))
    assert first.token_ids.tolist() == earlier.token_ids.tolist()
    assert first.logprobs[:cut].tolist() == kept.logprobs.tolist()
    assert first.kept_logmass[:cut].tolist() == kept.kept_logmass.tolist()
    assert first.versions.tolist() == [4] * cut + [6] * (len(earlier.token_ids) - cut)
    assert_same(second, undisturbed[2][1])


def test_whole_completions_are_handed_out_without_a_token_more(undisturbed: list[list[Completion]]) -> None:
    engine = engine_of()
    requests = [
        replace(request, prefixes=[begun(each) for each in group])
        for request, group in zip(requests_of(), undisturbed, strict=True)
    ]
    again = asyncio.run(all_of(engine, requests))
    assert engine.tokens_generated == 0
    reasons = set()
    for group, expected in zip(again, undisturbed, strict=True):
        for each, other in zip(group, expected, strict=True):
            assert_same(each, other)
            assert each.logprobs.tolist() == other.logprobs.tolist()
            reasons.add(each.stop_reason)
    assert reasons == {StopReason.EOS, StopReason.STOP, StopReason.LENGTH}


def test_what_is_begun_ends_where_a_completion_would(undisturbed: list[list[Completion]]) -> None:
    """Under other settings than it was sampled with: tokens after the end are left out."""
    earlier = max((each for group in undisturbed for each in group), key=lambda each: len(each.token_ids))
    tokens = earlier.token_ids.tolist()
    short = SAMPLING.model_copy(update={"stop_token_ids": [tokens[6]]})
    end = tokens.index(tokens[6]) + 1
    [found] = asyncio.run(engine_of().generate(GenerationRequest(PROMPTS[0], short, prefixes=[begun(earlier)])))
    assert found.token_ids.tolist() == tokens[:end]
    assert found.stop_reason is StopReason.EOS


def test_interrupt_hands_out_what_there_is() -> None:
    """Waiting, prefilled and running completions; those that had not started are empty. Texts and times make sense."""

    async def main() -> list[list[Completion]]:
        engine = engine_of(max_sequences=4, prefill_tokens=16)
        work = asyncio.ensure_future(all_of(engine, requests_of(SamplingConfig(max_new_tokens=30))))
        for _ in range(6):
            await asyncio.sleep(0)
        engine.interrupt()
        groups = await work
        assert engine.core.cached_entries == 0
        engine.interrupt()
        return groups

    groups = asyncio.run(main())
    undisturbed = asyncio.run(all_of(engine_of(), requests_of(SamplingConfig(max_new_tokens=30))))
    lengths = []
    for group, expected in zip(groups, undisturbed, strict=True):
        for each, other in zip(group, expected, strict=True):
            assert each.stop_reason is StopReason.ABORTED
            cut = len(each.token_ids)
            assert each.token_ids.tolist() == other.token_ids[:cut].tolist()
            np.testing.assert_allclose(each.logprobs, other.logprobs[:cut], atol=1e-5)
            assert len(each.logprobs) == len(each.versions) == len(each.kept_logmass) == cut
            assert each.text == TOKENIZER.decode(each.token_ids, skip_special_tokens=True)
            assert each.submitted_at <= each.started_at <= each.finished_at
            lengths.append(cut)
    assert min(lengths) == 0
    assert max(lengths) > 0


def test_begun_completions_survive_an_interrupt_before_they_start(undisturbed: list[list[Completion]]) -> None:
    engine = engine_of()
    engine.pause()
    request = requests_of(SamplingConfig(max_new_tokens=200))[2]
    request = replace(request, prefixes=[None, begun(undisturbed[2][1], 2), begun(undisturbed[2][2], 0)])
    [found] = asyncio.run(until(engine, 0, [request]))
    assert [len(each.token_ids) for each in found] == [0, 2, 0]


def test_begun_completions_are_restored_a_few_at_a_time() -> None:
    """A step computes about `prefill_tokens` anew, so that the event loop stays free."""
    engine = engine_of(max_sequences=50, prefill_tokens=64)
    [whole] = asyncio.run(
        all_of(engine, [GenerationRequest(PROMPTS[1], SamplingConfig(max_new_tokens=60), n=9, seed=3)])
    )
    request = GenerationRequest(
        PROMPTS[1], SamplingConfig(max_new_tokens=60), n=9, seed=3, prefixes=[begun(x, 40) for x in whole]
    )
    entries: list[int] = []

    async def main() -> list[Completion]:
        work = asyncio.ensure_future(engine.generate(request))
        while not work.done():
            entries.append(engine.core.cached_entries)
            await asyncio.sleep(0)
        return await work

    for each, other in zip(asyncio.run(main()), whole, strict=True):
        assert_same(each, other)
    rises = [after - before for before, after in pairwise(entries) if after > before]
    assert max(rises) <= 1 + 2


def test_begun_completions_go_on_under_new_weights() -> None:
    """Keys and values are computed with the new weights: the rest equals what these give after the tokens."""
    model = toy_model("qwen3", vocab_size=VOCAB)
    engine = NativeEngine(model, context=256, prefill_tokens=16)
    request = GenerationRequest(PROMPTS[1], SamplingConfig(max_new_tokens=40), n=2, seed=3)

    async def main() -> list[Completion]:
        [half] = await until(engine, 30, [request])
        with_new = toy_model("qwen3", vocab_size=VOCAB, seed=1)
        model.load_state_dict(with_new.state_dict())
        engine.weights_updated(1)
        return await engine.generate(replace(request, prefixes=[begun(each) for each in half]))

    new = NativeEngine(toy_model("qwen3", vocab_size=VOCAB, seed=1), context=256)
    for each in asyncio.run(main()):
        cut = int((each.versions == 0).sum())
        assert 10 <= cut < 40
        zeros = np.zeros(cut, np.float32)
        kept = CompletionPrefix(each.token_ids[:cut], zeros, zeros, each.versions[:cut])
        only = [None] * each.index + [kept]
        alone = asyncio.run(new.generate(replace(request, prefixes=only)))[each.index]
        assert alone.token_ids.tolist() == each.token_ids.tolist()
        np.testing.assert_allclose(alone.logprobs[cut:], each.logprobs[cut:], atol=1e-5)
