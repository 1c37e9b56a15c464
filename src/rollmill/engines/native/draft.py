"""Draft tokens of running completions: from an earlier completion, or guessed from n-grams."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from rollmill.config.rollout import NgramConfig
from rollmill.engines.base import Draft
from rollmill.types import FloatArray, IntArray

INITIAL_DRAFT_WINDOW, REDUCED_DRAFT_WINDOW = 32, 8
MIN_ACCEPTED_PER_PASS, MAX_LOW_YIELD_PASSES = 1, 3
"""A pass that accepts at most the first number of tokens is poor; the second number of poor passes ends guessing."""


@dataclass(frozen=True, slots=True, eq=False)
class ActiveDraft:
    """Draft tokens of a completion from index `start` on. Arrays: token_ids [T], known and probs [T, K], see Draft.

    They were sampled after exactly the tokens before them. Once the completion takes another token, the rest is only a
    guess (`guessed`), as the text may return to it; several poor passes in a row end it.
    """

    start: int
    token_ids: IntArray
    known: IntArray
    probs: FloatArray
    guessed: bool = False
    once: bool = False  #: the first wrong guess ends it
    window: int = INITIAL_DRAFT_WINDOW  #: tokens to verify in the next pass
    poor: int = 0  #: consecutive poor passes

    def left(self, at: int) -> int:
        """Number of draft tokens left from index `at` of the completion on."""
        return self.start + len(self.token_ids) - at

    def part(self, at: int, count: int) -> tuple[IntArray, IntArray, FloatArray]:
        """`count` draft tokens from index `at` of the completion on, with the known part of their distributions."""
        cut = slice(at - self.start, at - self.start + count)
        return self.token_ids[cut], self.known[cut], self.probs[cut]

    def after(self, accepted: int, tested: int) -> ActiveDraft | None:
        """Return the draft to continue with after a pass; None ends it."""
        if accepted == tested:
            return replace(self, window=2 * self.window if tested == self.window else self.window, poor=0)
        poor = self.poor + 1 if self.guessed and accepted <= MIN_ACCEPTED_PER_PASS else 0
        if self.once or poor == MAX_LOW_YIELD_PASSES:
            return None
        return replace(self, guessed=True, window=REDUCED_DRAFT_WINDOW, poor=poor)


def activate_draft(draft: Draft, begun: Sequence[int], limit: int) -> ActiveDraft | None:
    """Activate a draft for a completion with tokens `begun` and at most `limit`; None if the draft starts otherwise."""
    start = len(begun)
    if draft.token_ids[:start].tolist() != list(begun) or min(len(draft.token_ids), limit) <= start:
        return None
    rest = slice(start, limit)
    guessed = draft.top_ids.shape[1] == 0
    return ActiveDraft(start, draft.token_ids[rest], draft.top_ids[rest], draft.top_probs[rest], guessed)


def activate_ngram_draft(start: int, tokens: Sequence[int]) -> ActiveDraft:
    """Build a draft of guessed tokens."""
    ids = np.asarray(tokens, np.int32)
    nothing = np.zeros((len(ids), 0), np.int32)
    return ActiveDraft(start, ids, nothing, nothing.astype(np.float32), guessed=True, once=True, window=len(ids))


_LONGEST_PAUSE = 64


class NgramSpeculator:
    """Guesses the next tokens from repetitions of the text's own n-grams (prompt lookup, as in arXiv:2304.04487).

    After guesses that were not accepted it pauses, twice as long each time: text without repetition costs nothing.
    """

    def __init__(self, config: NgramConfig, prompt: Sequence[int]) -> None:
        self._length, self._tokens = config.length, config.tokens
        self._text, self._prompt = list(prompt), len(prompt)
        self._places: dict[tuple[int, ...], int] = {}
        self._noted = 0
        self._pause, self._not_before = 1, 0

    def propose(self, tokens: list[int]) -> list[int]:
        """Return guesses of the tokens after `tokens`, the completion so far; often none."""
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
        """Report that `accepted` of `guessed` tokens were accepted; the completion now has `length` tokens."""
        self._pause = 1 if 2 * accepted >= guessed else min(2 * self._pause, _LONGEST_PAUSE)
        self._not_before = length + (self._pause if self._pause > 1 else 0)
