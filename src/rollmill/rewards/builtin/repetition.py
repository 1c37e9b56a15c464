"""The repetition reward: repeated n-grams, and loops at the end of a text. Linear in its length."""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field

from rollmill.config.rewards import Reward
from rollmill.rewards.base import OK, Score
from rollmill.rewards.text.parsing import run_large_in_thread, split_words
from rollmill.types import Completion, Task

_TAIL = 4096
"""Tokens at the end that are searched for a loop."""
Hashes = npt.NDArray[np.uint64]


class RepetitionReward(Reward):
    """From 0 to -1: the fraction of repeated n-grams, or the fraction of the text in a loop at its end. Reads the whole
    text, reasoning included."""

    largest = 0.0
    name: Literal["repetition"]
    ngram: int = Field(8, ge=1)
    """Length of an n-gram in tokens (in words if a completion has no tokens)."""
    free: float = Field(0.0, ge=0, lt=1)
    """Fraction without a penalty; the rest is scaled to reach -1."""
    loop_times: int = Field(4, ge=2)
    """Minimum number of consecutive repeats of a loop at the end."""
    loop_tokens: int = Field(32, ge=2)
    """Minimum number of tokens of all repeats together."""

    async def score(self, task: Task, completion: Completion) -> Score:
        """Return -max(share of repeated n-grams, share of a loop at the end), beyond the free share. Outcome: ok or
        `loop`."""
        return await run_large_in_thread(len(completion.text), self._score, completion)

    def _score(self, completion: Completion) -> Score:
        penalty, looping = repetition_share(_ids(completion), self.ngram, self.free, self.loop_times, self.loop_tokens)
        return Score(-penalty if penalty else 0.0, "loop" if looping else OK)


def repetition_share(
    ids: npt.NDArray[np.int64], ngram: int, free: float, loop_times: int, loop_tokens: int
) -> tuple[float, bool]:
    """Return the larger share of repeated n-grams or a loop at the end, and whether there is a loop.

    The share is what exceeds `free`, scaled to reach 1.
    """
    looping = loop_length(ids[-_TAIL:], loop_times, loop_tokens)
    share = max(repeated_ngram_share(ids, ngram), looping / max(len(ids), 1))
    return max(0.0, share - free) / (1 - free), looping > 0


def _ids(completion: Completion) -> npt.NDArray[np.int64]:
    """Return token ids; word numbers if there is only text."""
    if len(completion.token_ids):
        return completion.token_ids.astype(np.int64)
    numbers: dict[str, int] = {}
    return np.array([numbers.setdefault(word, len(numbers)) for word in split_words(completion.text)], np.int64)


def repeated_ngram_share(ids: npt.NDArray[np.int64], n: int) -> float:
    """Return 1 - distinct n-grams / n-grams; 0 if there is none. n-grams are compared by 64-bit hashes."""
    count = len(ids) - n + 1
    if count < 1:
        return 0.0
    hashes = np.zeros(count, np.uint64)
    mixed = _mixed(ids.astype(np.uint64))
    for offset in range(n):
        hashes = _mixed(hashes) + mixed[offset : offset + count]
    return 1 - len(np.unique(hashes)) / count


def _mixed(values: Hashes) -> Hashes:
    """Apply splitmix64's finaliser: every bit depends on all others."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Hashes = values ^ (values >> np.uint64(31))
    return mixed


def loop_length(ids: npt.NDArray[np.int64], times: int, fewest: int) -> int:
    """Return the tokens of the longest suffix of `ids` that repeats at least `times` times; 0 if below `fewest`.

    The last repetition may be cut short. Read backwards, a suffix with period p is a prefix with a border of all but p
    tokens (Knuth, Morris and Pratt's prefix function).
    """
    backwards: list[int] = ids[::-1].tolist()
    borders = [0] * len(backwards)
    longest = border = 0
    for index in range(1, len(backwards)):
        while border and backwards[index] != backwards[border]:
            border = borders[border - 1]
        border += backwards[index] == backwards[border]
        borders[index] = border
        length = index + 1
        if length >= times * (length - border):
            longest = length
    return longest if longest >= fewest else 0
