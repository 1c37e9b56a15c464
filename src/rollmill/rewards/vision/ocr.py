"""The OCR reward: similarity of texts by edit distance."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rollmill.config.rewards.vision import OCRReward
from rollmill.errors import ConfigError
from rollmill.rewards.base import Score
from rollmill.rewards.text.parsing import MAX_TEXT_CHARS, run_large_in_thread, select_answer
from rollmill.types import Completion, Task
from rollmill_grading.normalization import to_half_width

Distance = Callable[[str, str, int], int]
"""Edit distance of two texts, or any number above the third argument if it exceeds that."""
_PAIRS_AT_ONCE = 25_000
"""Pairs of characters that are compared in the time of reading one."""


class OCRScorer:
    """ANLS or 1 - CER, from 0 to 1, of the most similar reference.

    Outcomes besides ok: `no_answer` (the configured part is missing), `too_long`.
    """

    def __init__(self, config: OCRReward) -> None:
        self._config, self._distance = config, _distance()

    async def score(self, task: Task, completion: Completion) -> Score:
        config = self._config.of_task(task.metadata)
        if config is None or task.answer is None:
            return Score(None)
        golds = accepted_texts(task.answer)
        text = select_answer(completion, config)
        if text is None:
            return Score(0.0, "no_answer")
        if len(text) > MAX_TEXT_CHARS:
            return Score(0.0, "too_long")
        work = len(text) * sum(map(len, golds)) // _PAIRS_AT_ONCE
        return Score(await run_large_in_thread(len(text) + work, self._best, text, golds, config))

    def _best(self, text: str, golds: list[str], config: OCRReward) -> float:
        answer = _folded(text, config)
        return max(text_similarity(_folded(gold, config), answer, config, self._distance) for gold in golds)


def text_similarity(gold: str, answer: str, config: OCRReward, distance: Distance) -> float:
    """Return the similarity from 0 to 1; 0 below the threshold.

    ANLS (arXiv:1905.13648, eq. 1; at the threshold itself as in the official script): 1 - distance / length of the
    longer. CER: 1 - distance / length of the reference. The distance is at least the difference of the lengths, so far
    longer answers are never compared.
    """
    length = max(len(gold), len(answer)) if config.measure == "anls" else len(gold)
    if length == 0:
        return float(not answer)
    if 1 - abs(len(gold) - len(answer)) / length < config.threshold:
        return 0.0
    score = max(0.0, 1 - distance(gold, answer, int((1 - config.threshold) * length) + 1) / length)
    return score if score >= config.threshold else 0.0


def accepted_texts(answer: Any) -> list[str]:
    """Return the texts that a task's answer accepts: one, or a list. Raises ValueError if it is something else."""
    golds = list(answer) if isinstance(answer, list | tuple) else [answer]
    if not golds or not all(isinstance(gold, str | int | float) and not isinstance(gold, bool) for gold in golds):
        raise ValueError(f"the task's answer is {answer!r:.80}; expected text, or a list of texts that are right")
    return [str(gold) for gold in golds]


def _folded(text: str, config: OCRReward) -> str:
    text = to_half_width(text)
    text = ("" if config.ignore_spaces else " ").join(text.split())
    return text.casefold() if config.ignore_case else text


def _distance() -> Distance:
    """Return rapidfuzz's distance, through a function that releases the GIL."""
    try:
        from rapidfuzz.distance import Levenshtein
        from rapidfuzz.process import cdist
    except ModuleNotFoundError as error:
        raise ConfigError("reward `ocr` needs rapidfuzz: pip install 'rollmill[vision]'") from error
    return lambda one, other, most: int(cdist([one], [other], scorer=Levenshtein.distance, score_cutoff=most)[0, 0])
