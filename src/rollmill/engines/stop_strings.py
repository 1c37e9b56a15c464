"""Running requests of every engine: stop strings, repetition, token limits and texts of completions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from rollmill.config.rollout import RepetitionConfig
from rollmill.engines.base import GenerationRequest
from rollmill.errors import ContextLengthError, EngineError
from rollmill.types import Completion


class StopStringMatcher:
    """Finds stop strings in growing token sequences.

    Most tokens cannot complete a stop string: a token whose text lacks the last character of every stop string is
    skipped without decoding anything. Tokens that are not text alone (bytes of a longer character) are always checked.
    """

    def __init__(self, tokenizer: Any, stops: tuple[str, ...]) -> None:
        self._tokenizer = tokenizer
        self._stops = stops
        self._last_characters = {stop[-1] for stop in stops}
        self._longest = max(len(stop) for stop in stops)
        self._may_complete = lru_cache(maxsize=None)(self._may_complete_uncached)

    def _may_complete_uncached(self, token: int) -> bool:
        text = self._tokenizer.decode([token])
        # a lone token may lose its leading space, so stop strings that end with one are always checked
        vague = "\ufffd" in text or " " in self._last_characters
        return vague or any(character in text for character in self._last_characters)

    def complete(self, tokens: list[int]) -> bool:
        """True if a stop string ends with or inside the last token."""
        if not self._may_complete(tokens[-1]):
            return False
        # a token decodes to at least one character, except parts of one: up to 4 bytes make a character
        tail = self._tokenizer.decode(tokens[-(4 * self._longest + 4) :])
        return any(stop in tail for stop in self._stops)

    def cut(self, text: str) -> str:
        """Return the text before the first stop string."""
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        return text[: min(found)] if found else text


class RepetitionDetector:
    """Detects endless repetition in one completion as its tokens arrive.

    A token costs a comparison with each of the last `period` tokens.
    """

    def __init__(self, config: RepetitionConfig) -> None:
        periods = np.arange(1, config.period + 1)
        self._needed = np.maximum((config.times - 1) * periods, config.tokens - periods)
        self._recent = np.full(config.period, -1)  # the latest first
        self._runs = np.zeros(config.period, np.int64)  # by period: how many tokens in a row equal the one before it

    def add(self, token: int) -> bool:
        """Add a token; True if the latest tokens are now one stretch repeated often enough in a row."""
        self._runs = (self._runs + 1) * (self._recent == token)
        self._recent[1:] = self._recent[:-1]
        self._recent[0] = token
        return bool((self._runs >= self._needed).any())


@lru_cache(maxsize=64)
def cached_stop_matcher(tokenizer: Any, stops: tuple[str, ...]) -> StopStringMatcher:
    """The matcher for a tokenizer and stop strings; cached, because it remembers which tokens can complete one."""
    return StopStringMatcher(tokenizer, stops)


def max_new_tokens_for(request: GenerationRequest, context: int) -> int:
    """Return the most new tokens that each completion may have.

    Raises:
        EngineError: the prompt is empty.
        ContextLengthError: it leaves no room.
    """
    length = len(request.prompt_ids)
    if length == 0:
        raise EngineError(f"{request.id}: the prompt has no tokens; give it some text or a BOS token")
    if length >= context:
        raise ContextLengthError(
            f"{request.id}: the prompt has {length} tokens but the model's context is {context}, which leaves no room "
            "for a completion; shorten the prompt or drop the task (taskset.on_bad_row, filters)"
        )
    return min(request.sampling.max_new_tokens, context - length)


def stop_matcher_for(request: GenerationRequest, tokenizer: Any) -> StopStringMatcher | None:
    """The matcher of the request's stop strings, if any. Raises EngineError without a tokenizer."""
    if not request.sampling.stop:
        return None
    if tokenizer is None:
        raise EngineError(f"{request.id}: stop strings need a tokenizer; use stop_token_ids")
    return cached_stop_matcher(tokenizer, tuple(request.sampling.stop))


def completion_text(tokens: Sequence[int], tokenizer: Any, stops: StopStringMatcher | None) -> str:
    """The text of a completion without special tokens; with `stops`, only the text before the first stop string."""
    if stops is not None:
        text = stops.cut(tokenizer.decode(tokens))  # a stop string may hold special tokens
        for special in tokenizer.all_special_tokens:
            text = text.replace(special, "")
        return text
    return "" if tokenizer is None else str(tokenizer.decode(tokens, skip_special_tokens=True))


@dataclass(slots=True, eq=False)
class RunningRequest:
    """A request, and the queue of its finished completions."""

    request: GenerationRequest
    limit: int  # new tokens per completion
    stop_ids: frozenset[int]
    stops: StopStringMatcher | None
    tokenizer: Any
    results: asyncio.Queue[Completion | BaseException] = field(default_factory=asyncio.Queue)
    submitted_at: float = field(default_factory=time.perf_counter)
