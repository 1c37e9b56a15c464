"""Stop strings end a completion at the token that completes them, whatever the tokens' boundaries."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from support.toys import toy_model, toy_tokenizer

from rollmill.config.rollout import SamplingConfig
from rollmill.engines.base import GenerationRequest
from rollmill.engines.native import NativeEngine
from rollmill.engines.stop_strings import StopStringMatcher
from rollmill.types import Completion, StopReason

TOKENIZERS = {kind: toy_tokenizer(kind) for kind in ("char", "bpe")}


def first_end(tokenizer: Any, tokens: list[int], stops: tuple[str, ...]) -> int | None:
    """Number of tokens after which a stop string first stands in the decoded text, by definition."""
    for end in range(1, len(tokens) + 1):
        if any(stop in tokenizer.decode(tokens[:end]) for stop in stops):
            return end
    return None


@given(
    st.sampled_from(sorted(TOKENIZERS)),
    st.text(alphabet="ab 12#\n+=é漢", min_size=1, max_size=30),
    st.lists(st.text(alphabet="ab 12#\n", min_size=1, max_size=3), min_size=1, max_size=3, unique=True),
)
@settings(max_examples=150, deadline=None)
def test_found_at_the_first_token_that_completes_one(kind: str, text: str, stops: list[str]) -> None:
    tokenizer = TOKENIZERS[kind]
    tokens = tokenizer.encode(text, add_special_tokens=False)
    finder = StopStringMatcher(tokenizer, tuple(stops))
    found = next((end for end in range(1, len(tokens) + 1) if finder.complete(tokens[:end])), None)
    assert found == first_end(tokenizer, tokens, tuple(stops))


@given(st.text(alphabet="abc", max_size=12), st.lists(st.text(alphabet="abc", min_size=1, max_size=2), min_size=1))
def test_text_ends_before_the_first_stop_string(text: str, stops: list[str]) -> None:
    cut = StopStringMatcher(None, tuple(stops)).cut(text)
    assert text.startswith(cut)
    assert not any(stop in cut for stop in stops)
    assert cut == text or any(text[len(cut) :].startswith(stop) for stop in stops)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValidationError, match="at least 1 character"):
        SamplingConfig(stop=["\n", ""])


@pytest.mark.parametrize("kind", sorted(TOKENIZERS))
def test_the_engine_stops_there_and_keeps_the_tokens(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    model = toy_model("qwen3", vocab_size=len(tokenizer))

    def complete(**options: Any) -> list[Completion]:
        engine = NativeEngine(model, tokenizer, context=256)
        request = GenerationRequest([3, 4, 5], SamplingConfig(max_new_tokens=60, **options), n=12, seed=4)
        return asyncio.run(engine.generate(request))

    stops = ("1", "a", "e")
    stopped = 0
    for free, ended in zip(complete(), complete(stop=list(stops)), strict=True):
        end = first_end(tokenizer, free.token_ids.tolist(), stops)
        assert ended.token_ids.tolist() == free.token_ids.tolist()[:end]
        assert (ended.stop_reason is StopReason.STOP) == (end is not None)
        assert not any(stop in ended.text for stop in stops)
        stopped += end is not None
    assert stopped > 0
