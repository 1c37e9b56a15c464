"""The chart reward: ChartQA's relaxed accuracy."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from rollmill.rewards.base import HEDGED, NO_ANSWER, Score
from rollmill.rewards.vision.base import VisionReward, accepted_texts
from rollmill.types import Completion, Task

if TYPE_CHECKING:
    from rollmill.rewards.vision.numbers import ChartNumber
    from rollmill_grading.extraction import FinalAnswer

_YEAR = re.compile(r"(?:19|20)\d\d")
_BETWEEN = re.compile(r";|\n"), re.compile(r";|\n|,(?=\s)"), re.compile(r";|\n|,(?=\s)|\band\b")
_SAID_YEAR = re.compile(r"(?<![\d.,$€£¥])(?:19|20)\d\d(?![\d%]|[.,]\d)")
_BESIDE = re.compile(
    r"(?:^\W*(?:in|from|between|since|by|compared)|\b(?:than(?: in)?|from|between|since|after|before|until|to|and|with"
    r"|unlike|not(?: in)?))\s*(?:the )?(?:years? )?$",
    re.IGNORECASE,
)
"""Words that make a year only a comparison of the answer."""
_CHAIN = re.compile(
    r"[\s$]*[\d\s.,%+*/×÷·−–()-]+(?:\s*=\s*[\d\s.,%+*/×÷·−–()-]+)*=\s*(?P<result>[^=+*/×÷]{1,60}?)[\s$]*"
)
_LONGEST = 2000


class ChartReward(VisionReward):
    """Relaxed accuracy of ChartQA (arXiv:2203.10244): numbers within a tolerance, other text exactly."""

    decides = True
    compares_answers = True
    largest = 1.0
    name: Literal["chart"]
    tolerance: float = Field(0.05, ge=0, lt=1)
    """Accepted relative error of numbers."""
    exact_years: bool = True
    """Years (1900 to 2099) must match exactly. `false` is as published, where 1950 passes for 2019."""

    async def score(self, task: Task, completion: Completion) -> Score:
        """Return 1 if the answer equals the reference: numbers within the tolerance, other text up to case and spaces.

        A list is an answer of several values, in that order, separated by ", ", ";", "and" or lines. Outcomes besides
        ok: `no_answer`, `hedged`, `too_long`.
        """
        from rollmill_grading.extraction import answer_section, extract_answer
        from rollmill_grading.phrase import strip_markup

        options = self.of_task(task.metadata)
        if options is None or task.answer is None:
            return Score(None)
        golds = accepted_texts(task.answer)
        text = options.select_answer(completion)
        found = None if text is None else extract_answer(text)
        if text is None or found is None:
            return Score(0.0, NO_ANSWER)
        if found.hedged:
            return Score(0.0, HEDGED)
        if found.kind == "line" and len(text) > _LONGEST:
            return Score(0.0, "too_long")
        is_marked = found.kind in ("boxed", "hash", "said", "corrected")
        whole = strip_markup(found.text) if is_marked else strip_markup(answer_section(text))
        if len(whole) > _LONGEST:
            whole = found.text
        if not isinstance(task.answer, list | tuple):
            readings = dict.fromkeys(
                (whole, found.text, *_values(golds[0], found, "" if is_marked else answer_section(text)))
            )
            return Score(float(any(relaxed_match(golds[0], each, options) for each in readings if each)))
        splits = [[part for part in between.split(whole.strip().strip("[]")) if part.strip()] for between in _BETWEEN]
        values = next((values for values in splits if len(values) == len(golds)), None)
        if values is None:
            return Score(0.0)
        return Score(float(all(relaxed_match(*pair, options) for pair in zip(golds, values, strict=True))))


def _values(gold: str, found: FinalAnswer, part: str) -> list[str]:
    """Return the readings of an answer in the reference's kind: a year, a computed number, or words of `part`."""
    from rollmill.rewards.vision.numbers import find_stated_number
    from rollmill_grading.phrase import extract_statements

    if find_stated_number(gold) is None:
        return [found.value, *extract_statements(part)]
    years = (
        [] if found.kind != "sentence" or not _YEAR.fullmatch(gold.strip()) else list(_SAID_YEAR.finditer(found.text))
    )
    if years:
        return [next((each for each in years if not _BESIDE.search(found.text, 0, each.start())), years[-1])[0]]
    chain = _CHAIN.fullmatch(found.value)
    return [found.value, *([chain["result"]] if chain else [])]


def relaxed_match(gold: str, value: str, options: ChartReward) -> bool:
    """True if the values match by relaxed accuracy (arXiv:2203.10244, 3.1).

    Years must be equal, unless configured otherwise.
    """
    from rollmill.rewards.vision.numbers import find_stated_number, within_tolerance

    wanted, given = find_stated_number(gold), find_stated_number(value)
    if wanted is None or given is None:
        return _folded(gold) == _folded(value)
    if options.exact_years and _YEAR.fullmatch(gold.strip()):
        return wanted == given
    return any(within_tolerance(one, other, options.tolerance) for one, other in _readings(wanted, given))


def _readings(gold: ChartNumber, value: ChartNumber) -> list[tuple[float, float]]:
    """Return the pairs to compare. 25 % is .25; if only one side has the sign, it may have been omitted: 25."""
    omitted = gold.percent != value.percent and abs(gold.value) >= 1
    return [(gold.share, value.share), *([(gold.value, value.value)] if omitted else [])]


def _folded(text: str) -> str:
    from rollmill_grading.normalization import to_half_width

    return " ".join(to_half_width(text).casefold().split()).strip("\"'").rstrip(".")
