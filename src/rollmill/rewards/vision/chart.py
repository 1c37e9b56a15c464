"""The chart reward: ChartQA's relaxed accuracy."""

from __future__ import annotations

import re

from rollmill.config.rewards import ChartReward
from rollmill.core.types import Completion, Task
from rollmill.rewards.answers.final import FinalAnswer, answer_part, final_answer
from rollmill.rewards.answers.phrase import tidy
from rollmill.rewards.answers.statement import stated as said_in_words
from rollmill.rewards.answers.writing import half_width
from rollmill.rewards.base import HEDGED, NO_ANSWER, Verdict
from rollmill.rewards.text.reading import judged_part
from rollmill.rewards.vision.figures import Figure, close, stated
from rollmill.rewards.vision.ocr import references

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


class Chart:
    """1 if the answer is the reference: numbers within the tolerance, other text but for case and spaces.

    A list is an answer of several values, in that order, separated by ", ", ";", "and" or lines. Outcomes besides ok:
    `no_answer`, `hedged`, `too_long`.
    """

    def __init__(self, config: ChartReward) -> None:
        self._config = config

    async def judge(self, task: Task, completion: Completion) -> Verdict:
        config = self._config.of_task(task.metadata)
        if config is None or task.answer is None:
            return Verdict(None)
        golds = references(task.answer)
        text = judged_part(completion.text, config)
        found = None if text is None else final_answer(text)
        if text is None or found is None:
            return Verdict(0.0, NO_ANSWER)
        if found.hedged:
            return Verdict(0.0, HEDGED)
        if found.kind == "line" and len(text) > _LONGEST:
            return Verdict(0.0, "too_long")
        is_said = found.kind in ("boxed", "hash", "said", "corrected")
        whole = tidy(found.text) if is_said else tidy(answer_part(text))
        if len(whole) > _LONGEST:
            whole = found.text
        if not isinstance(task.answer, list | tuple):
            said = dict.fromkeys((whole, found.text, *_values(golds[0], found, "" if is_said else answer_part(text))))
            return Verdict(float(any(same_value(golds[0], each, config) for each in said if each)))
        splits = [[part for part in between.split(whole.strip().strip("[]")) if part.strip()] for between in _BETWEEN]
        values = next((values for values in splits if len(values) == len(golds)), None)
        if values is None:
            return Verdict(0.0)
        return Verdict(float(all(same_value(*pair, config) for pair in zip(golds, values, strict=True))))


def _values(gold: str, found: FinalAnswer, part: str) -> list[str]:
    """Readings of an answer in the reference's kind: a year, a number behind its calculation, words of `part`."""
    if stated(gold) is None:
        return [found.value, *said_in_words(part)]
    years = (
        [] if found.kind != "sentence" or not _YEAR.fullmatch(gold.strip()) else list(_SAID_YEAR.finditer(found.text))
    )
    if years:
        return [next((each for each in years if not _BESIDE.search(found.text, 0, each.start())), years[-1])[0]]
    chain = _CHAIN.fullmatch(found.value)
    return [found.value, *([chain["result"]] if chain else [])]


def same_value(gold: str, value: str, config: ChartReward) -> bool:
    """Relaxed accuracy (arXiv:2203.10244, 3.1). A year has to be the same unless the reward says otherwise."""
    wanted, given = stated(gold), stated(value)
    if wanted is None or given is None:
        return _folded(gold) == _folded(value)
    if config.exact_years and _YEAR.fullmatch(gold.strip()):
        return wanted == given
    return any(close(one, other, config.tolerance) for one, other in _readings(wanted, given))


def _readings(gold: Figure, value: Figure) -> list[tuple[float, float]]:
    """25 % is .25; where only one side has the sign, it may have been left away: 25."""
    left_away = gold.percent != value.percent and abs(gold.value) >= 1
    return [(gold.share, value.share), *([(gold.value, value.value)] if left_away else [])]


def _folded(text: str) -> str:
    return " ".join(half_width(text).casefold().split()).strip("\"'").rstrip(".")
