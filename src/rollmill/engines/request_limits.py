"""What engines make of a request, whatever generates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollmill.engines.base import GenerationRequest
from rollmill.engines.stop_strings import StopStringMatcher, cached_stop_matcher
from rollmill.errors import ContextLengthError, EngineError


def max_new_tokens_for(request: GenerationRequest, context: int) -> int:
    """New tokens that each completion may have.

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
    """What finds its stop strings, where it has some. Raises EngineError without a tokenizer."""
    if not request.sampling.stop:
        return None
    if tokenizer is None:
        raise EngineError(f"{request.id}: stop strings need a tokenizer; use stop_token_ids")
    return cached_stop_matcher(tokenizer, tuple(request.sampling.stop))


def completion_text(tokens: Sequence[int], tokenizer: Any, stops: StopStringMatcher | None) -> str:
    """The text of a completion without special tokens; `stops` of one that a stop string ended: what is before it."""
    if stops is not None:
        text = stops.cut(tokenizer.decode(tokens))  # a stop string may hold special tokens
        for special in tokenizer.all_special_tokens:
            text = text.replace(special, "")
        return text
    return "" if tokenizer is None else str(tokenizer.decode(tokens, skip_special_tokens=True))
