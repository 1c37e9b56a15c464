"""The chart reward: ChartQA's relaxed accuracy."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from rollmill.config.rewards.vision import ChartReward
from rollmill.rewards.base import HEDGED, NO_ANSWER, Score
from rollmill.rewards.text.parsing import select_answer
from rollmill.rewards.vision.ocr import accepted_texts
from rollmill.types import Completion, Task
from rollmill_grading.extraction import FinalAnswer, answer_section, extract_answer
from rollmill_grading.normalization import to_half_width
from rollmill_grading.phrase import extract_statements as said_in_words
from rollmill_grading.phrase import strip_markup
from rollmill_grading.quantities import normalize_answer, parse_quantity, strip_approximation

# Numbers as written in charts, tables and captions.

_NUMBER = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{1,3})?")
_THOUSANDS = re.compile(r"[+-]?\d{1,3}(?:,\d{3})+(?:\.\d*)?")
_CURRENCY = re.compile(r"^([+-]?)\s*[$€£¥]\s*([+-]?)(?=[\d.])")
_APPROXIMATED = re.compile(r"\s*\$\s*(?:\\approx|\\sim|≈|~)")
_LONGEST_FIGURES = 60


@dataclass(frozen=True, slots=True)
class ChartNumber:
    """A number, and whether it has a percent sign; `value` is the number before that sign."""

    value: float
    percent: bool = False

    @property
    def share(self) -> float:
        """The number as a fraction: 25 % is .25."""
        return self.value / 100 if self.percent else self.value


def parse_chart_number(text: str) -> ChartNumber | None:
    """Parse a whole text as a number; currency signs and commas between thousands are ignored."""
    text = to_half_width(text).strip()
    if len(text) > _LONGEST_FIGURES:
        return None
    text = text.replace("−", "-").rstrip(".")
    percent = text.endswith("%")
    text = _CURRENCY.sub(r"\1\2", text.removesuffix("%").strip().rstrip("$€£¥ "))
    if _THOUSANDS.fullmatch(text):
        text = text.replace(",", "")
    value = float(text) if _NUMBER.fullmatch(text) else math.nan
    return ChartNumber(value, percent) if math.isfinite(value) else None


def find_stated_number(text: str) -> ChartNumber | None:
    """Return the number of an answer, also with a unit or in words: `1.2 million`, `12元`, `一万五千`."""
    text = strip_approximation(text.strip().strip("$").strip() if _APPROXIMATED.match(text) else text.strip())
    found = parse_chart_number(text)
    if found is not None or len(text) > _LONGEST_FIGURES:
        return found
    amount = parse_quantity(normalize_answer(text))
    return None if amount is None or abs(amount.value) > 1e300 else ChartNumber(float(amount.value), amount.percent)


def within_tolerance(gold: float, value: float, tolerance: float) -> bool:
    """True if two numbers differ by at most `tolerance` times the reference."""
    return abs(value - gold) <= max(tolerance, 1e-9) * abs(gold)


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


class ChartScorer:
    """1 if the answer equals the reference: numbers within the tolerance, other text up to case and spaces.

    A list is an answer of several values, in that order, separated by ", ", ";", "and" or lines. Outcomes besides ok:
    `no_answer`, `hedged`, `too_long`.
    """

    def __init__(self, config: ChartReward) -> None:
        self._config = config

    async def score(self, task: Task, completion: Completion) -> Score:
        config = self._config.of_task(task.metadata)
        if config is None or task.answer is None:
            return Score(None)
        golds = accepted_texts(task.answer)
        text = select_answer(completion, config)
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
            return Score(float(any(relaxed_match(golds[0], each, config) for each in readings if each)))
        splits = [[part for part in between.split(whole.strip().strip("[]")) if part.strip()] for between in _BETWEEN]
        values = next((values for values in splits if len(values) == len(golds)), None)
        if values is None:
            return Score(0.0)
        return Score(float(all(relaxed_match(*pair, config) for pair in zip(golds, values, strict=True))))


def _values(gold: str, found: FinalAnswer, part: str) -> list[str]:
    """Return the readings of an answer in the reference's kind: a year, a computed number, or words of `part`."""
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
    """True if the values match by relaxed accuracy (arXiv:2203.10244, 3.1).

    Years must be equal, unless configured otherwise.
    """
    wanted, given = find_stated_number(gold), find_stated_number(value)
    if wanted is None or given is None:
        return _folded(gold) == _folded(value)
    if config.exact_years and _YEAR.fullmatch(gold.strip()):
        return wanted == given
    return any(within_tolerance(one, other, config.tolerance) for one, other in _readings(wanted, given))


def _readings(gold: ChartNumber, value: ChartNumber) -> list[tuple[float, float]]:
    """Return the pairs to compare. 25 % is .25; if only one side has the sign, it may have been omitted: 25."""
    omitted = gold.percent != value.percent and abs(gold.value) >= 1
    return [(gold.share, value.share), *([(gold.value, value.value)] if omitted else [])]


def _folded(text: str) -> str:
    return " ".join(to_half_width(text).casefold().split()).strip("\"'").rstrip(".")
