"""Stop strings, found as tokens arrive."""

from __future__ import annotations

from functools import lru_cache
from typing import Any


class StopStringMatcher:
    """Finds stop strings in growing token sequences.

    Most tokens cannot complete a stop string: a token whose own text lacks the last character of every stop string is
    passed over without decoding anything. Tokens that are not text on their own (bytes of a longer character) are
    always checked.
    """

    def __init__(self, tokenizer: Any, stops: tuple[str, ...]) -> None:
        self._tokenizer = tokenizer
        self._stops = stops
        self._last_characters = {stop[-1] for stop in stops}
        self._longest = max(len(stop) for stop in stops)
        self._may_complete = lru_cache(maxsize=None)(self._may_complete_uncached)

    def _may_complete_uncached(self, token: int) -> bool:
        text = self._tokenizer.decode([token])
        # a lone token may lose its leading space, so it says nothing of stop strings that end with one
        vague = "\ufffd" in text or " " in self._last_characters
        return vague or any(character in text for character in self._last_characters)

    def complete(self, tokens: list[int]) -> bool:
        """Whether a stop string ends with or inside the last token."""
        if not self._may_complete(tokens[-1]):
            return False
        # a token decodes to at least one character, except parts of one: up to 4 bytes make a character
        tail = self._tokenizer.decode(tokens[-(4 * self._longest + 4) :])
        return any(stop in tail for stop in self._stops)

    def cut(self, text: str) -> str:
        """Text before the first stop string."""
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        return text[: min(found)] if found else text


@lru_cache(maxsize=64)
def cached_stop_matcher(tokenizer: Any, stops: tuple[str, ...]) -> StopStringMatcher:
    """The finder for a tokenizer and a set of stop strings; kept, because it remembers what each token can do."""
    return StopStringMatcher(tokenizer, stops)
