"""Completions that are drafted by earlier ones, or by their own repetitions, through the engine."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support.toys import toy_model, toy_tokenizer

from rollmill.config.rollout import NgramConfig, SamplingConfig
from rollmill.engines.base import CompletionPrefix, Draft, GenerationRequest, SampledToken
from rollmill.engines.native import NativeEngine, decoder, draft_verifier
from rollmill.engines.native.decode import DecodeContext
from rollmill.types import Completion, DraftUse, StopReason

TOKENIZER = toy_tokenizer("char")
VOCAB = len(TOKENIZER)
PROMPTS = [TOKENIZER.encode(text, add_special_tokens=False) for text in ("1+1", "how many?", "x" * 40, "12 12 12 12")]
SAMPLING = SamplingConfig(temperature=0.8, top_p=0.95, max_new_tokens=70, stop=["ab", "!"], stop_token_ids=[9])


def model_of(change: float = 0.0, architecture: str = "qwen3", vocab: int = VOCAB) -> Any:
    """A toy model, and how it looks after `change` has been added to its weights."""
    model, other = (toy_model(architecture, vocab_size=vocab, seed=seed) for seed in (0, 1))
    with torch.no_grad():
        for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
            mine.lerp_(theirs, change)
    return model


def engine_of(model: Any, **options: Any) -> NativeEngine:
    return NativeEngine(model, TOKENIZER, **({"context": 256, "max_sequences": 50, "prefill_tokens": 64} | options))


def ask(engine: NativeEngine, requests: Sequence[GenerationRequest]) -> list[list[Completion]]:
    async def main() -> list[list[Completion]]:
        return list(await asyncio.gather(*map(engine.generate, requests)))

    return asyncio.run(main())


def interrupted(engine: NativeEngine, request: GenerationRequest, tokens: int) -> list[list[Completion]]:
    """What there is once so many tokens more were generated."""

    async def main() -> list[list[Completion]]:
        end = engine.tokens_generated + tokens
        work = asyncio.ensure_future(engine.generate(request))
        while not work.done() and engine.tokens_generated < end:
            await asyncio.sleep(0)
        engine.interrupt()
        return [await work]

    return asyncio.run(main())


def requests_of(
    sampling: SamplingConfig = SAMPLING, seed: int = 0, top: int = VOCAB, n: int = 3
) -> list[GenerationRequest]:
    return [GenerationRequest(p, sampling, n=n, seed=seed + i, record_top=top) for i, p in enumerate(PROMPTS)]


def draft(completion: Completion) -> Draft:
    assert completion.top_ids is not None
    assert completion.top_probs is not None
    return Draft(completion.token_ids, completion.top_ids, completion.top_probs)


def with_drafts(
    requests: Sequence[GenerationRequest], groups: Sequence[Sequence[Completion]]
) -> list[GenerationRequest]:
    return [
        replace(request, drafts=[draft(each) for each in group])
        for request, group in zip(requests, groups, strict=True)
    ]


def flat(groups: Sequence[Sequence[Completion]]) -> list[Completion]:
    return [each for group in groups for each in group]


def logits_after(model: Any, completion: Completion) -> torch.Tensor:
    tokens = [*completion.prompt_ids.tolist(), *completion.token_ids.tolist()]
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0, len(completion.prompt_ids) - 1 : -1]


@pytest.mark.parametrize("architecture", ["qwen3", "gemma2"])
def test_unchanged_weights_accept_everything(architecture: str) -> None:
    engine = engine_of(model_of(architecture=architecture))
    first = ask(engine, requests_of())
    engine.weights_updated(7)
    again = ask(engine, with_drafts(requests_of(seed=90), first))
    for before, after in zip(flat(first), flat(again), strict=True):
        assert after.token_ids.tolist() == before.token_ids.tolist()
        assert (after.text, after.stop_reason) == (before.text, before.stop_reason)
        assert set(after.versions.tolist()) == {7}
        np.testing.assert_allclose(after.logprobs, before.logprobs, atol=1e-5)
        np.testing.assert_allclose(after.kept_logmass, before.kept_logmass, atol=1e-5)
        assert before.drafted is None
        assert after.drafted is not None
        assert set(after.drafted.tolist()) == {DraftUse.EARLIER}
    assert {each.stop_reason for each in flat(again)} == {StopReason.EOS, StopReason.STOP, StopReason.LENGTH}
    counts = engine.core.drafting.counts
    assert counts.reuse_accepted == counts.reuse_tested == sum(len(each.token_ids) for each in flat(first))
    assert counts.passes < 30
    assert engine.core.cached_entries == 0


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["qwen3", "gemma2"])
def test_numbers_are_those_of_the_new_weights(architecture: str) -> None:
    """Log-probs, kept mass and most probable tokens of accepted, replaced and later tokens equal a forward pass."""
    old, new = model_of(architecture=architecture), model_of(0.1, architecture)
    sampling = SamplingConfig(temperature=0.8, top_k=20, max_new_tokens=70)
    first = ask(engine_of(old), requests_of(sampling))
    engine = engine_of(new)
    found = flat(ask(engine, with_drafts(requests_of(sampling, seed=90), first)))
    assert 0 < engine.core.drafting.counts.reuse_accepted < sum(len(each.token_ids) for each in found)
    for each in found:
        probs = (logits_after(new, each) / 0.8).softmax(-1)
        top = probs.topk(20)
        own = probs.gather(1, torch.from_numpy(each.token_ids.astype(np.int64))[:, None])[:, 0]
        kept = top.values.sum(-1)
        np.testing.assert_allclose(each.logprobs, (own / kept).log(), atol=2e-5)
        np.testing.assert_allclose(each.kept_logmass, kept.log(), atol=2e-5)
        assert each.top_probs is not None
        assert np.all(each.top_probs[:, 20:] == 0)
        np.testing.assert_allclose(each.top_probs[:, :20], top.values / kept[:, None], atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("change", [0.02, 0.3])
def test_a_completion_depends_on_its_seed_and_draft_only(change: float) -> None:
    """Not on what shares the batch, on how drafts are cut into passes, or on the size of the window."""
    first = ask(engine_of(model_of()), requests_of())
    requests = with_drafts(requests_of(seed=90), first)
    together = ask(engine_of(model_of(change)), requests)
    for options in ({"max_sequences": 1, "prefill_tokens": 2048}, {"max_sequences": 5, "prefill_tokens": 16}):
        alone = [ask(engine_of(model_of(change), **options), [request])[0] for request in requests]
        assert [each.token_ids.tolist() for each in flat(alone)] == [each.token_ids.tolist() for each in flat(together)]
    assert [each.token_ids.tolist() for each in flat(together)] != [each.token_ids.tolist() for each in flat(first)]


def test_greedy_with_drafts_is_greedy() -> None:
    greedy = SamplingConfig(temperature=0, max_new_tokens=60)
    first = ask(engine_of(model_of()), requests_of())
    engine = engine_of(model_of(0.01))
    found = ask(engine, with_drafts(requests_of(greedy), first))
    expected = ask(engine_of(model_of(0.01)), requests_of(greedy))
    assert [each.token_ids.tolist() for each in flat(found)] == [each.token_ids.tolist() for each in flat(expected)]
    assert engine.core.drafting.counts.reuse_tested > 0


def test_drafts_that_are_too_long_or_go_on_from_other_tokens() -> None:
    engine = engine_of(model_of())
    [first] = ask(engine, [GenerationRequest(PROMPTS[0], SamplingConfig(max_new_tokens=40), seed=3, record_top=VOCAB)])
    [[short]] = ask(engine, [GenerationRequest(PROMPTS[0], SamplingConfig(max_new_tokens=9), drafts=[draft(first[0])])])
    assert short.token_ids.tolist() == first[0].token_ids[:9].tolist()
    assert short.stop_reason is StopReason.LENGTH
    other = (first[0].token_ids[:5] + 1) % VOCAB
    zeros = np.zeros(5, np.float32)
    begun = CompletionPrefix(other.astype(np.int32), zeros, zeros, np.zeros(5, np.int32))
    request = GenerationRequest(PROMPTS[0], SamplingConfig(max_new_tokens=40), prefixes=[begun], seed=3)
    assert [each.token_ids.tolist() for each in flat(ask(engine, [request]))] == [
        each.token_ids.tolist() for each in flat(ask(engine, [replace(request, drafts=[draft(first[0])])]))
    ]


def test_interrupted_in_between() -> None:
    """A draft goes on from the tokens that a completion is begun with; tokens of unknown origin are never accepted."""
    sampling = SamplingConfig(max_new_tokens=60)
    engine = engine_of(model_of())
    [first] = ask(engine, [GenerationRequest(PROMPTS[1], sampling, n=2, seed=3, record_top=VOCAB)])
    [half] = interrupted(engine, GenerationRequest(PROMPTS[1], sampling, n=2, seed=3, record_top=VOCAB), 30)
    assert all(0 < len(each.token_ids) < 60 for each in half)
    arrays = [(x.token_ids, x.logprobs, x.kept_logmass, x.versions) for x in half]
    with_top = [CompletionPrefix(*each, x.top_ids, x.top_probs) for each, x in zip(arrays, half, strict=True)]
    request = GenerationRequest(PROMPTS[1], sampling, n=2, seed=50, record_top=VOCAB, prefixes=with_top)
    [found] = ask(engine, [replace(request, drafts=[draft(each) for each in first])])
    for each, whole in zip(found, first, strict=True):
        assert each.token_ids.tolist() == whole.token_ids.tolist()
        assert each.top_ids is not None
        assert (each.top_probs > 0).any(1).all()
    [unknown] = ask(engine, [replace(request, prefixes=[CompletionPrefix(*each) for each in arrays])])
    assert [int((each.top_probs == 0).all(1).sum()) for each in unknown] == [len(each.token_ids) for each in half]


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [1, 8, 20, 150])
def test_interrupted_amid_a_draft_equals_undisturbed(tokens: int) -> None:
    """Where little is known of the old distribution, a rejected token is often replaced by itself."""
    plain = GenerationRequest(PROMPTS[1], SamplingConfig(max_new_tokens=60), n=6, seed=3, record_top=1)
    [first] = ask(engine_of(model_of()), [plain])
    request = replace(plain, seed=50, drafts=[draft(each) for each in first])
    [whole] = ask(engine_of(model_of(0.02)), [request])
    engine = engine_of(model_of(0.02), max_sequences=2)
    [half] = interrupted(engine, request, tokens)
    assert any(each.stop_reason is StopReason.ABORTED for each in half)
    begun = [
        CompletionPrefix(x.token_ids, x.logprobs, x.kept_logmass, x.versions, x.top_ids, x.top_probs) for x in half
    ]
    [found] = ask(engine, [replace(request, prefixes=begun)])
    assert [each.token_ids.tolist() for each in found] == [each.token_ids.tolist() for each in whole]


def test_a_rejected_token_that_is_replaced_by_itself_keeps_the_draft() -> None:
    plain = GenerationRequest(PROMPTS[1], SamplingConfig(temperature=0.2, max_new_tokens=60), n=6, seed=3)
    [first] = ask(engine_of(model_of()), [plain])
    unknown = [np.zeros((len(each.token_ids), 1), np.float32) for each in first]
    drafts = [Draft(x.token_ids, np.zeros_like(p, np.int32), p) for x, p in zip(first, unknown, strict=True)]
    engine = engine_of(model_of())
    [found] = ask(engine, [replace(plain, seed=50, drafts=drafts)])
    kept = 0
    for each, other in zip(found, first, strict=True):
        same = (each.token_ids == other.token_ids).tolist()
        kept += same.index(False) if False in same else len(same)
    assert engine.core.drafting.counts.reuse_tested >= kept > 6


def test_drafts_leave_the_event_loop_free_between_passes() -> None:
    engine = engine_of(model_of(), prefill_tokens=16)
    request = GenerationRequest(PROMPTS[0], SamplingConfig(max_new_tokens=70), n=8, seed=5, record_top=VOCAB)
    [first] = ask(engine, [request])
    generated: list[int] = []

    async def main() -> None:
        work = asyncio.ensure_future(engine.generate(replace(request, drafts=[draft(each) for each in first])))
        while not work.done():
            generated.append(engine.tokens_generated)
            await asyncio.sleep(0)

    asyncio.run(main())
    assert max(np.diff(generated)) <= 32 + 16


def test_who_listens_is_told_of_every_token_and_gets_no_draft() -> None:
    engine = engine_of(model_of())
    request = GenerationRequest(PROMPTS[0], SamplingConfig(max_new_tokens=30), n=3, seed=5, record_top=VOCAB)
    [first] = ask(engine, [request])
    told: list[SampledToken] = []
    listening = replace(request, seed=9, on_token=told.append, drafts=[draft(each) for each in first])
    [found] = ask(engine, [listening])
    for each in found:
        assert [one.token for one in told if one.index == each.index] == each.token_ids.tolist()


# -- distributions ---------------------------------------------------------------------------------------------


def exact_pairs(model: Any, prompt: list[int], vocab: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Joint distribution of the next two tokens, [V * V]."""
    with torch.no_grad():
        first = model(torch.tensor([prompt])).logits[0, -1].double().softmax(-1)
        second = model(torch.tensor([[*prompt, token] for token in range(vocab)])).logits[:, -1].double().softmax(-1)
    return (first[:, None] * second).flatten().numpy()


def excess(completions: Sequence[Completion], joint: np.ndarray[Any, np.dtype[np.float64]], vocab: int) -> float:
    """Chi-square statistic over its limit for a false alarm in 1e-4 (Wilson-Hilferty)."""
    n, counts = len(completions), np.zeros(vocab * vocab)
    for each in completions:
        counts[each.token_ids[0] * vocab + each.token_ids[1]] += 1
    big = joint * n >= 5
    expected = np.append(joint[big] * n, joint[~big].sum() * n)
    observed = np.append(counts[big], counts[~big].sum())
    degrees = len(expected) - 1
    limit = degrees * (1 - 2 / (9 * degrees) + 3.719 * (2 / (9 * degrees)) ** 0.5) ** 3
    return float(((observed - expected) ** 2 / np.maximum(expected, 1e-9)).sum() / limit)


@pytest.mark.slow
@pytest.mark.parametrize("top", [2, pytest.param(12, marks=pytest.mark.slow)])
def test_what_is_sampled_follows_the_new_distribution(top: int, monkeypatch: pytest.MonkeyPatch) -> None:
    vocab, n, prompt, two = 12, 6000, [3, 1, 2], SamplingConfig(max_new_tokens=2)
    new = model_of(0.25, vocab=vocab)
    joint = exact_pairs(new, prompt, vocab)
    options: dict[str, Any] = {"max_sequences": 2000, "prefill_tokens": 4096}
    [first] = ask(
        engine_of(model_of(vocab=vocab), **options), [GenerationRequest(prompt, two, n=n, seed=1, record_top=top)]
    )
    assert excess(first, joint, vocab) > 1
    request = GenerationRequest(prompt, two, n=n, seed=2, drafts=[draft(each) for each in first])
    engine = engine_of(new, **options)
    [found] = ask(engine, [request])
    assert excess(found, joint, vocab) < 1
    counts = engine.core.drafting.counts
    assert 0.1 < counts.reuse_accepted / counts.reuse_tested < 0.9
    monkeypatch.setattr(draft_verifier, "residual_weights", lambda new, drafted: new)
    [biased] = ask(engine_of(new, **options), [request])
    assert excess(biased, joint, vocab) > 1


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_guesses_change_nothing_but_the_number_of_passes(temperature: float) -> None:
    plain = SamplingConfig(temperature=temperature, max_new_tokens=120, top_p=0.8)
    guessing = plain.model_copy(update={"ngram_draft": NgramConfig(length=2, tokens=8)})
    engine = engine_of(model_of(), max_sequences=5)
    found = flat(ask(engine, requests_of(guessing)))
    expected = flat(ask(engine_of(model_of()), requests_of(plain)))
    for each, other in zip(found, expected, strict=True):
        assert each.token_ids.tolist() == other.token_ids.tolist()
        np.testing.assert_allclose(each.logprobs, other.logprobs, atol=1e-5)
    assert engine.core.drafting.counts.guess_accepted > (200 if temperature == 0 else 10)


@pytest.mark.slow
def test_decode_steps_of_fixed_shapes_follow_guesses(monkeypatch: pytest.MonkeyPatch) -> None:
    """As captured graphs have them: one context serves until rows come or go, whatever guesses add in between."""
    made: list[DecodeContext] = []

    def fixed(*args: Any, exact: bool) -> DecodeContext:
        made.append(DecodeContext(*args, exact=False))
        return made[-1]

    sampling = SamplingConfig(temperature=0.4, max_new_tokens=60)
    guessing = sampling.model_copy(update={"ngram_draft": NgramConfig(length=2, tokens=8)})
    expected = flat(ask(engine_of(model_of()), requests_of(sampling)))
    monkeypatch.setattr(decoder, "DecodeContext", fixed)
    engine = engine_of(model_of())
    found = flat(ask(engine, requests_of(guessing)))
    assert [each.token_ids.tolist() for each in found] == [each.token_ids.tolist() for each in expected]
    assert len(made) < engine.core.drafting.counts.passes


def test_a_draft_of_unknown_origin_is_a_guess() -> None:
    """Its tokens count where plain sampling gives them; one that is wrong does not end it."""
    request = GenerationRequest(PROMPTS[0], SamplingConfig(max_new_tokens=60), n=4, seed=5)
    [plain] = ask(engine_of(model_of()), [request])
    drafts = []
    for each in plain:
        tokens = each.token_ids.copy()
        tokens[20] ^= 1
        nothing = np.zeros((len(tokens), 0), np.int32)
        drafts.append(Draft(tokens, nothing, nothing.astype(np.float32)))
    engine = engine_of(model_of())
    [found] = ask(engine, [replace(request, drafts=drafts)])
    assert [each.token_ids.tolist() for each in found] == [each.token_ids.tolist() for each in plain]
    assert engine.core.drafting.counts.guess_accepted > 150
    uses = Counter(use for each in found for use in ([] if each.drafted is None else each.drafted.tolist()))
    assert uses[DraftUse.GUESS] == engine.core.drafting.counts.guess_accepted
    assert uses[DraftUse.GUESS] + uses[DraftUse.REJECTED] == engine.core.drafting.counts.guess_tested
    assert all(each.drafted is not None and each.drafted[20] == DraftUse.REJECTED for each in found)
