"""The experts that the engine records: those of the pass in which the next token's log-prob was made."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import numpy as np
import pytest
import torch
from support.toys import toy_model

from rollmill.config.rollout import NgramConfig, SamplingConfig
from rollmill.engines.base import CompletionPrefix, GenerationRequest
from rollmill.engines.native import NativeEngine
from rollmill.models.routing import capture_routing
from rollmill.rollout.draft_cache import draft_from_completion
from rollmill.types import Completion

MODEL = toy_model("qwen3_moe", seed=4)
PROMPTS = [[(7 * i + j) % 120 + 2 for i in range(length)] for j, length in enumerate((3, 20, 41))]
SAMPLING = SamplingConfig(max_new_tokens=20)


def engine_of(model: Any = MODEL, **options: Any) -> NativeEngine:
    settings = {"context": 256, "max_sequences": 5, "prefill_tokens": 16, "record_routing": True}
    return NativeEngine(model, **(settings | options))


def requests_of(**options: Any) -> list[GenerationRequest]:
    return [
        GenerationRequest(prompt, SAMPLING, **({"n": 3, "seed": 50 + i} | options)) for i, prompt in enumerate(PROMPTS)
    ]


async def all_of(engine: NativeEngine, requests: list[GenerationRequest]) -> list[Completion]:
    return [each for group in await asyncio.gather(*map(engine.generate, requests)) for each in group]


def chosen(model: Any, tokens: list[int]) -> np.ndarray:
    """The experts that one plain pass over a sequence chooses for all tokens but the last."""
    with torch.no_grad(), capture_routing(model) as routing:
        model(input_ids=torch.tensor([tokens]), use_cache=False)
    return routing.take().numpy()[:-1]


def tokens_of(completion: Completion) -> list[int]:
    return [*completion.prompt_ids.tolist(), *completion.token_ids.tolist()]


def assert_recorded(completions: list[Completion], model: Any = MODEL) -> None:
    for each in completions:
        assert each.routing is not None
        assert each.routing.dtype == np.uint8
        np.testing.assert_array_equal(each.routing, chosen(model, tokens_of(each)))


def test_prompts_in_pieces_and_decoded_tokens_have_the_experts_of_one_plain_pass() -> None:
    assert_recorded(asyncio.run(all_of(engine_of(), requests_of())))


def test_without_being_asked_nothing_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> None:
        raise AssertionError("a router was taken over")

    monkeypatch.setattr("rollmill.models.routing._patch_routers", refused)
    found = asyncio.run(all_of(engine_of(record_routing=False), requests_of()))
    assert all(each.routing is None for each in found)


def test_accepted_and_rejected_drafts_and_guesses_leave_the_experts_of_what_stays() -> None:
    earlier = asyncio.run(all_of(engine_of(), requests_of(record_top=4)))
    other = toy_model("qwen3_moe", seed=4)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.03)
    engine = engine_of(other)
    drafts = [[draft_from_completion(each) for each in earlier[3 * i : 3 * i + 3]] for i in range(3)]
    found = asyncio.run(
        all_of(
            engine, [GenerationRequest(p, SAMPLING, n=3, seed=9 + i, drafts=drafts[i]) for i, p in enumerate(PROMPTS)]
        )
    )
    assert 0 < engine.core.drafting.counts.reuse_accepted < engine.core.drafting.counts.reuse_tested
    assert_recorded(found, other)
    guessing = SAMPLING.model_copy(update={"ngram_draft": NgramConfig(length=1, tokens=4), "temperature": 0.3})
    engine = engine_of()
    found = asyncio.run(all_of(engine, [GenerationRequest(p, guessing, n=2, seed=i) for i, p in enumerate(PROMPTS)]))
    assert engine.core.drafting.counts.guess_tested > engine.core.drafting.counts.guess_accepted
    assert_recorded(found)


async def with_new_weights(keep: bool) -> tuple[list[Completion], Any, Any]:
    """Completions under way while the weights change, and models with the weights of before and after."""
    old = toy_model("qwen3_moe", seed=4)
    model, new = copy.deepcopy(old), toy_model("qwen3_moe", seed=5)
    engine = engine_of(model, max_sequences=9, keep=keep)
    work = asyncio.ensure_future(all_of(engine, requests_of()))
    while engine.tokens_generated < 90:
        await asyncio.sleep(0)
    with torch.no_grad():
        for mine, other in zip(model.parameters(), new.parameters(), strict=True):
            mine.copy_(other)
    engine.weights_updated(1)
    return await work, old, new


def test_a_token_keeps_the_experts_of_the_pass_that_its_successor_was_sampled_after() -> None:
    completions, old, new = asyncio.run(with_new_weights(keep=False))
    stitched = 0
    for each in completions:
        assert each.routing is not None
        made = len(each.prompt_ids) + int((each.versions == 0).sum())  # tokens that the old weights made
        fed = made - 1 if made > len(each.prompt_ids) else 0  # and read
        np.testing.assert_array_equal(each.routing[:fed], chosen(old, tokens_of(each))[:fed])
        np.testing.assert_array_equal(each.routing[fed:], chosen(new, tokens_of(each))[fed:])
        stitched += 0 < fed < len(each.routing)
    assert stitched == 9
    kept, old, _ = asyncio.run(with_new_weights(keep=True))
    for each in kept:
        fed = len(each.prompt_ids) + int((each.versions == 0).sum()) - 1
        assert each.routing is not None
        assert len(each.routing) == len(tokens_of(each)) - 1
        np.testing.assert_array_equal(each.routing[:fed], chosen(old, tokens_of(each))[:fed])


@pytest.mark.parametrize("known", [True, False])
def test_a_completion_that_is_begun_again_goes_on_with_its_experts(known: bool) -> None:
    async def main() -> list[Completion]:
        engine = engine_of()
        work = asyncio.ensure_future(all_of(engine, requests_of()))
        while engine.tokens_generated < 60:
            await asyncio.sleep(0)
        engine.interrupt()
        parts = await work
        assert {len(each.token_ids) for each in parts} & {0}
        assert max(len(each.token_ids) for each in parts) > 1
        begun = [
            CompletionPrefix(p.token_ids, p.logprobs, p.kept_logmass, p.versions, routing=p.routing if known else None)
            for p in parts
        ]
        again = [
            GenerationRequest(p, SAMPLING, n=3, seed=50 + i, prefixes=begun[3 * i : 3 * i + 3])
            for i, p in enumerate(PROMPTS)
        ]
        return await all_of(engine, again)

    found = asyncio.run(main())
    assert_recorded(found)
    whole = asyncio.run(all_of(engine_of(), requests_of()))
    assert [tokens_of(each) for each in found] == [tokens_of(each) for each in whole]
