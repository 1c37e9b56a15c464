"""The OCR reward: similarity of texts by edit distance."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from rollmill.errors import ConfigError
from rollmill.rewards.base import Score
from rollmill.rewards.text.parsing import MAX_TEXT_CHARS, run_large_in_thread
from rollmill.rewards.vision.base import VisionReward, accepted_texts
from rollmill.types import Completion, Task

if TYPE_CHECKING:
    from rollmill.rewards.resources import RewardResources

Distance = Callable[[str, str, int], int]
"""Edit distance of two texts, or any number above the third argument if it exceeds that."""
_PAIRS_AT_ONCE = 25_000
"""Pairs of characters that are compared in the time of reading one."""


class OCRReward(VisionReward):
    """Similarity to the text of an image, by edit distance (extra `vision`); the best of several references counts."""

    needs_extra = ("vision", "rapidfuzz")
    decides = True
    largest = 1.0
    name: Literal["ocr"]
    measure: Literal["anls", "cer"] = "anls"
    """`anls` (arXiv:1905.13648): 1 - distance / length of the longer text, 0 below `threshold`. `cer`: 1 - distance /
    length of the reference, at least 0."""
    threshold: float = Field(0.5, ge=0, le=1)
    """Similarities below this count as 0, with both measures."""
    ignore_case: bool = True
    """Ignore upper and lower case."""
    ignore_spaces: bool = False
    """Ignore white space; otherwise any run of it counts as one space."""
    _distance: Distance

    def setup(self, resources: RewardResources) -> None:
        self._distance = _distance()

    async def score(self, task: Task, completion: Completion) -> Score:
        """Return ANLS or 1 - CER, from 0 to 1, of the most similar reference.

        Outcomes besides ok: `no_answer` (the configured part is missing), `too_long`.
        """
        options = self.of_task(task.metadata)
        if options is None or task.answer is None:
            return Score(None)
        golds = accepted_texts(task.answer)
        text = options.select_answer(completion)
        if text is None:
            return Score(0.0, "no_answer")
        if len(text) > MAX_TEXT_CHARS:
            return Score(0.0, "too_long")
        work = len(text) * sum(map(len, golds)) // _PAIRS_AT_ONCE
        return Score(await run_large_in_thread(len(text) + work, self._best, text, golds, options))

    def _best(self, text: str, golds: list[str], options: OCRReward) -> float:
        answer = _folded(text, options)
        return max(text_similarity(_folded(gold, options), answer, options, self._distance) for gold in golds)


def text_similarity(gold: str, answer: str, options: OCRReward, distance: Distance) -> float:
    """Return the similarity from 0 to 1; 0 below the threshold.

    ANLS (arXiv:1905.13648, eq. 1; at the threshold itself as in the official script): 1 - distance / length of the
    longer. CER: 1 - distance / length of the reference. The distance is at least the difference of the lengths, so far
    longer answers are never compared.
    """
    length = max(len(gold), len(answer)) if options.measure == "anls" else len(gold)
    if length == 0:
        return float(not answer)
    if 1 - abs(len(gold) - len(answer)) / length < options.threshold:
        return 0.0
    score = max(0.0, 1 - distance(gold, answer, int((1 - options.threshold) * length) + 1) / length)
    return score if score >= options.threshold else 0.0


def _folded(text: str, options: OCRReward) -> str:
    from rollmill_grading.normalization import to_half_width

    text = to_half_width(text)
    text = ("" if options.ignore_spaces else " ").join(text.split())
    return text.casefold() if options.ignore_case else text


def _distance() -> Distance:
    """Return rapidfuzz's distance, through a function that releases the GIL."""
    try:
        from rapidfuzz.distance import Levenshtein
        from rapidfuzz.process import cdist
    except ModuleNotFoundError as error:
        raise ConfigError("reward `ocr` needs rapidfuzz: pip install 'rollmill[vision]'") from error
    return lambda one, other, most: int(cdist([one], [other], scorer=Levenshtein.distance, score_cutoff=most)[0, 0])
