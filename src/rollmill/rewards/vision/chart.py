"""The chart reward: ChartQA's relaxed accuracy."""

from __future__ import annotations

import re

from rollmill.config.rewards import ChartReward
from rollmill.rewards.answers.extraction import FinalAnswer, answer_section, extract_answer
from rollmill.rewards.answers.normalization import to_half_width
from rollmill.rewards.answers.phrase import strip_markup
from rollmill.rewards.answers.statement import extract_statements as said_in_words
from rollmill.rewards.base import HEDGED, NO_ANSWER, Score
from rollmill.rewards.text.parsing import select_text
from rollmill.rewards.vision.figures import ChartNumber, find_stated_number, within_tolerance
from rollmill.rewards.vision.ocr import accepted_texts
from rollmill.types import Completion, Task

_YEAR = re.compile(r"(?:19|20)\d\d")
_BETWEEN = re.compile(r";|\n"), re.compile(r";|\n|,(?=\s)"), re.compile(r";|\n|,(?=\s)|\band\b")
_SAID_YEAR = re.compile(r"(?<![\d.,$€£¥])(?:19|20)\d\d(?![\d%]|[.,]\d)")
_BESIDE = re.compile(
    r"(?:^\W*(?:in|from|between|since|by|compared)|\b(?:than(?: in)?|from|between|since|after|before|until|to|and|with"
    r"|unlike|not(?: in)?))\s*(?:the )?(?:years? )?$",
    re.IGNORECASE,
)
"""What makes a year one that the answer is only set beside."""
_CHAIN = re.compile(
    r"[\s$]*[\d\s.,%+*/×÷·−–()-]+(?:\s*=\s*[\d\s.,%+*/×÷·−–()-]+)*=\s*(?P<result>[^=+*/×÷]{1,60}?)[\s$]*"
)
_LONGEST = 2000


class ChartScorer:
    """1 if the answer is the reference: numbers within the tolerance, other text but for case and spaces.

    A list is an answer of several values, in that order, separated by ", ", ";", "and" or lines. Outcomes besides ok:
    `no_answer`, `hedged`, `too_long`.
    """

    def __init__(self, config: ChartReward) -> None:
        self._config = config

    async def judge(self, task: Task, completion: Completion) -> Score:
        config = self._config.of_task(task.metadata)
        if config is None or task.answer is None:
            return Score(None)
        golds = accepted_texts(task.answer)
        text = select_text(completion.text, config)
        found = None if text is None else extract_answer(text)
        if text is None or found is None:
            return Score(0.0, NO_ANSWER)
        if found.hedged:
            return Score(0.0, HEDGED)
        if found.kind == "line" and len(text) > _LONGEST:
            return Score(0.0, "too_long")
        is_said = found.kind in ("boxed", "hash", "said", "corrected")
        whole = strip_markup(found.text) if is_said else strip_markup(answer_section(text))
        if len(whole) > _LONGEST:
            whole = found.text
        if not isinstance(task.answer, list | tuple):
            said = dict.fromkeys(
                (whole, found.text, *_values(golds[0], found, "" if is_said else answer_section(text)))
            )
            return Score(float(any(relaxed_match(golds[0], each, config) for each in said if each)))
        splits = [[part for part in between.split(whole.strip().strip("[]")) if part.strip()] for between in _BETWEEN]
        values = next((values for values in splits if len(values) == len(golds)), None)
        if values is None:
            return Score(0.0)
        return Score(float(all(relaxed_match(*pair, config) for pair in zip(golds, values, strict=True))))


def _values(gold: str, found: FinalAnswer, part: str) -> list[str]:
    """Readings of an answer in the reference's kind: a year, a number behind its calculation, words of `part`."""
    if find_stated_number(gold) is None:
        return [found.value, *said_in_words(part)]
    years = (
        [] if found.kind != "sentence" or not _YEAR.fullmatch(gold.strip()) else list(_SAID_YEAR.finditer(found.text))
    )
    if years:
        return [next((each for each in years if not _BESIDE.search(found.text, 0, each.start())), years[-1])[0]]
    chain = _CHAIN.fullmatch(found.value)
    return [found.value, *([chain["result"]] if chain else [])]


def relaxed_match(gold: str, value: str, config: ChartReward) -> bool:
    """Relaxed accuracy (arXiv:2203.10244, 3.1). A year has to be the same unless the reward says otherwise."""
    wanted, given = find_stated_number(gold), find_stated_number(value)
    if wanted is None or given is None:
        return _folded(gold) == _folded(value)
    if config.exact_years and _YEAR.fullmatch(gold.strip()):
        return wanted == given
    return any(within_tolerance(one, other, config.tolerance) for one, other in _readings(wanted, given))


def _readings(gold: ChartNumber, value: ChartNumber) -> list[tuple[float, float]]:
    """25 % is .25; where only one side has the sign, it may have been left away: 25."""
    left_away = gold.percent != value.percent and abs(gold.value) >= 1
    return [(gold.share, value.share), *([(gold.value, value.value)] if left_away else [])]


def _folded(text: str) -> str:
    return " ".join(to_half_width(text).casefold().split()).strip("\"'").rstrip(".")
