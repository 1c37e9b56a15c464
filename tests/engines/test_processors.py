"""Penalties, biases and grammars in the native engine: what is sampled, and that it is recorded exactly."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.endpoints import toy_engine
from torch import Tensor
from transformers import RepetitionPenaltyLogitsProcessor

from rollmill.config.rollout import NgramConfig, SamplingConfig
from rollmill.engines.base import CompletionPrefix, Draft, GenerationRequest, LogitsProcessor, TokenPenalties
from rollmill.engines.logits_processors import GrammarCompiler, PenaltyProcessor, ProcessorList
from rollmill.types import Completion, StopReason

PENALTIES = TokenPenalties(presence=0.75, frequency=0.5, repetition=1.3, bias={5: 4.0, 9: -3.0, 40: 3.5})
PROMPT = [7, 40, 12, 12, 90]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["ann", "bob"]}, "number": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "number"],
    "additionalProperties": False,
}


def generate(engine: Any, new: Callable[[], LogitsProcessor] | None, **options: Any) -> list[Completion]:
    """Completions of one request, and of one without a processor in the same batch."""
    sampling = options.pop("sampling", SamplingConfig(max_new_tokens=24, temperature=0.8, top_p=0.95))
    request = GenerationRequest(PROMPT, sampling, n=4, seed=3, new_processor=new, **options)

    async def both() -> list[Completion]:
        found, _ = await asyncio.gather(engine.generate(request), engine.generate(GenerationRequest(PROMPT, sampling)))
        return list(found)

    return asyncio.run(both())


def own_logits(engine: Any, completion: Completion) -> Tensor:
    """The model's logits [T, V] before each token of a completion."""
    ids = [*completion.prompt_ids.tolist(), *completion.token_ids.tolist()]
    with torch.no_grad():
        logits: Tensor = engine.core.weights.model(torch.tensor([ids])).logits[0]
    return logits[len(completion.prompt_ids) - 1 : -1].float()


def penalized(logits_V: Tensor, penalties: TokenPenalties, made: list[int]) -> Tensor:
    """The definitions of vLLM and OpenAI, and transformers' own repetition penalty."""
    found_V = logits_V.clone()
    for token, bias in penalties.bias.items():
        found_V[token] += bias
    processor = RepetitionPenaltyLogitsProcessor(penalties.repetition)
    found_V = processor(torch.tensor([PROMPT + made]), found_V[None])[0]  # type: ignore[arg-type]
    for token in set(made):
        found_V[token] -= penalties.presence + penalties.frequency * made.count(token)
    return found_V


def test_penalties_are_those_of_the_definition_and_recorded_exactly() -> None:
    engine, _ = toy_engine()
    made = generate(engine, lambda: PenaltyProcessor(PENALTIES, PROMPT), sampling=SamplingConfig(max_new_tokens=24))
    assert len({tuple(each.token_ids.tolist()) for each in made}) == 4
    for completion in made:
        tokens, logits_TV = completion.token_ids.tolist(), own_logits(engine, completion)
        for at, token in enumerate(tokens):
            sampled_V = torch.log_softmax(penalized(logits_TV[at], PENALTIES, tokens[:at]), -1)
            assert completion.logprobs[at] == pytest.approx(float(sampled_V[token]), abs=1e-4)
        own_T = torch.log_softmax(logits_TV, -1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert completion.logprobs + completion.kept_logmass == pytest.approx(own_T.numpy(), abs=1e-4)
        assert not np.allclose(completion.kept_logmass, 0)


def test_a_bias_and_a_penalty_decide() -> None:
    engine, _ = toy_engine()
    always = TokenPenalties(bias={33: 100.0})
    sampling = SamplingConfig(max_new_tokens=6)
    made = generate(engine, lambda: PenaltyProcessor(always, PROMPT), sampling=sampling)
    assert {tuple(each.token_ids.tolist()) for each in made} == {(33,) * 6}
    once = TokenPenalties(bias={33: 100.0, 34: 95.0, 35: 90.0}, frequency=7.0, presence=10.0)
    made = generate(
        engine, lambda: PenaltyProcessor(once, PROMPT), sampling=sampling.model_copy(update={"temperature": 0})
    )
    assert made[0].token_ids.tolist() == [33, 34, 35, 33, 34, 33]


def test_a_grammar_is_followed_to_its_end_and_recorded_exactly() -> None:
    engine, tokenizer = toy_engine()
    grammar = GrammarCompiler(tokenizer, [tokenizer.eos_token_id]).compile(
        "start: %json " + json.dumps(SCHEMA | {"x-guidance": {"whitespace_flexible": False}})
    )
    penalties = TokenPenalties(frequency=0.5)
    for temperature, top_p in ((1.0, 1.0), (0.7, 0.9), (0.0, 1.0)):
        sampling = SamplingConfig(max_new_tokens=60, temperature=temperature, top_p=top_p)

        def new() -> LogitsProcessor:
            return ProcessorList([grammar.new_processor(), PenaltyProcessor(penalties, PROMPT)])

        made = generate(engine, new, sampling=sampling)
        scale = temperature or 1.0
        for completion in made:
            value = json.loads(completion.text)
            assert value["name"] in ("ann", "bob")
            assert 0 <= value["number"] <= 99
            assert completion.stop_reason is StopReason.EOS
            own_TV = torch.log_softmax(own_logits(engine, completion) / scale, -1)
            own_T = own_TV.gather(1, torch.from_numpy(completion.token_ids).long()[:, None])[:, 0]
            assert completion.logprobs + completion.kept_logmass == pytest.approx(own_T.numpy(), abs=1e-3)
            assert (completion.logprobs <= 0).all()
        if temperature:
            assert len({each.text for each in made}) > 1
    assert made[0].logprobs[0] == 0.0, "the first brace is the only token possible"


def test_a_completion_that_continues_follows_the_same_grammar() -> None:
    engine, tokenizer = toy_engine()
    grammar = GrammarCompiler(tokenizer, [tokenizer.eos_token_id]).compile("start: %json " + json.dumps(SCHEMA))
    sampling = SamplingConfig(max_new_tokens=90)
    whole = generate(engine, grammar.new_processor, sampling=sampling)
    first = whole[0]
    begun = CompletionPrefix(first.token_ids[:7], first.logprobs[:7], first.kept_logmass[:7], first.versions[:7])
    again = generate(engine, grammar.new_processor, sampling=sampling, prefixes=[begun])
    assert again[0].token_ids.tolist() == first.token_ids.tolist()


def test_drafts_are_not_used_with_a_processor() -> None:
    engine, _ = toy_engine()
    sampling = SamplingConfig(max_new_tokens=8, ngram_draft=NgramConfig(length=1, tokens=4))
    draft = Draft(np.full(8, 44, np.int32), np.zeros((8, 0), np.int32), np.zeros((8, 0), np.float32))
    only = TokenPenalties(bias={33: 100.0})
    made = generate(engine, lambda: PenaltyProcessor(only, PROMPT), sampling=sampling, drafts=[draft] * 4)
    assert {tuple(each.token_ids.tolist()) for each in made} == {(33,) * 8}


@pytest.mark.parametrize("lark", ['start: "unclosed', 'start: %json {"type": "nonsense"}'])
def test_a_grammar_that_is_none_is_refused(lark: str) -> None:
    _, tokenizer = toy_engine()
    with pytest.raises(ValueError, match=r"\w"):
        GrammarCompiler(tokenizer, [tokenizer.eos_token_id]).compile(lark)


def test_a_grammar_that_cannot_be_followed_ends_the_completion_and_says_so() -> None:
    _, tokenizer = toy_engine()
    processor = GrammarCompiler(tokenizer, [tokenizer.eos_token_id]).compile('start: "a" "b"').new_processor()
    logits_V = torch.zeros(len(tokenizer) + 3)
    [token] = tokenizer.encode("z", add_special_tokens=False)
    found_V = processor([token], logits_V)  # which the grammar does not allow
    assert processor.failure
    assert torch.isfinite(found_V).nonzero()[:, 0].tolist() == [tokenizer.eos_token_id]
    assert not logits_V.any()
