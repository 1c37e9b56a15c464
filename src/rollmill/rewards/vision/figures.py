"""Numbers as charts, tables and captions write them."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

_NUMBER = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{1,3})?")
_THOUSANDS = re.compile(r"[+-]?\d{1,3}(?:,\d{3})+(?:\.\d*)?")
_IN_TEXT = re.compile(r"(?<![^\W_])(?<!\.)[-−]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:[eE][+-]?\d{1,3})?")
_CURRENCY = re.compile(r"^([+-]?)\s*[$€£¥]\s*([+-]?)(?=[\d.])")
_LONGEST = 60
_SPELLED = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
)
_SPELLED_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
_TENS = {word: 10 * value for value, word in enumerate(_SPELLED_TENS.split(), 2)}
_SCALES = {"dozen": 12, "hundred": 100, "thousand": 1000}
NUMBER_WORDS = {word: value for value, word in enumerate(_SPELLED.split())} | {"none": 0} | _TENS


@dataclass(frozen=True, slots=True)
class Figure:
    """A number, and whether a percent sign stands behind it; `value` is the number before that sign."""

    value: float
    percent: bool = False

    @property
    def share(self) -> float:
        """25 % is .25."""
        return self.value / 100 if self.percent else self.value


def figure(text: str) -> Figure | None:
    """The number that a text is as a whole; signs of currencies and commas between thousands do not count."""
    text = text.strip()
    if len(text) > _LONGEST:
        return None
    text = text.replace("−", "-").rstrip(".")
    percent = text.endswith("%")
    text = _CURRENCY.sub(r"\1\2", text.removesuffix("%").strip().rstrip("$€£¥ "))
    if _THOUSANDS.fullmatch(text):
        text = text.replace(",", "")
    value = float(text) if _NUMBER.fullmatch(text) else math.nan
    return Figure(value, percent) if math.isfinite(value) else None


def last_number(text: str) -> float | None:
    """The last number in a text; of a text without digits the last one in words."""
    found = [each for each in _IN_TEXT.findall(text[-2000:]) if len(each) <= _LONGEST]
    if found:
        value = float(found[-1].replace(",", "").replace("−", "-"))
        return value if math.isfinite(value) else None
    return _last_spoken(re.findall(r"[a-z]+|[^\sa-z-]", text[-2000:].lower()))


def _last_spoken(words: list[str]) -> float | None:
    """The last number in words, such as "twenty-five" or "two hundred and five". None for none."""
    found, thousands, below, before = None, 0, 0, ""
    for word in words:
        if word == "and" and before in _SCALES:
            continue
        if word in _SCALES:
            if before not in NUMBER_WORDS and before not in _SCALES:
                thousands = below = 0
            if word == "thousand":
                thousands, below = 1000 * (below or 1), 0
            else:
                below = (below % 100 or 1) * _SCALES[word]
        elif word in NUMBER_WORDS:
            if before not in _SCALES and not (before in _TENS and 0 < NUMBER_WORDS[word] < 10):
                thousands = below = 0
            below += NUMBER_WORDS[word]
        if word in _SCALES or word in NUMBER_WORDS:
            found = float(thousands + below)
        before = word
    return found


def close(gold: float, value: float, tolerance: float) -> bool:
    """Whether two numbers differ by at most `tolerance` times the reference."""
    return abs(value - gold) <= max(tolerance, 1e-9) * abs(gold)
