"""Guesses at how a text goes on, from its own repetitions (prompt lookup, as in arXiv:2304.04487)."""

from __future__ import annotations

from collections.abc import Sequence

from rollmill.config.rollout import NgramConfig

_LONGEST_PAUSE = 64


class NgramSpeculator:
    """Remembers what followed each n-gram of one completion and its prompt.

    After guesses that were not accepted it pauses, twice as long each time: text without repetition costs nothing.
    """

    def __init__(self, config: NgramConfig, prompt: Sequence[int]) -> None:
        self._length, self._tokens = config.length, config.tokens
        self._text, self._prompt = list(prompt), len(prompt)
        self._places: dict[tuple[int, ...], int] = {}
        self._noted = 0
        self._pause, self._not_before = 1, 0

    def propose(self, tokens: list[int]) -> list[int]:
        """What may follow the tokens of the completion so far; often nothing."""
        if len(tokens) < self._not_before:
            return []
        self._text += tokens[len(self._text) - self._prompt :]
        text, length = self._text, self._length
        for start in range(self._noted, len(text) - length):
            self._places[tuple(text[start : start + length])] = start + length
        self._noted = max(self._noted, len(text) - length)
        at = self._places.get(tuple(text[-length:]))
        return [] if at is None else text[at : at + self._tokens]

    def told(self, accepted: int, guessed: int, length: int) -> None:
        """How many of the guessed tokens were accepted; the completion now has `length` tokens."""
        self._pause = 1 if 2 * accepted >= guessed else min(2 * self._pause, _LONGEST_PAUSE)
        self._not_before = length + (self._pause if self._pause > 1 else 0)
