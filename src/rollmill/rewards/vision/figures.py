"""Numbers as charts, tables and captions write them."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

_NUMBER = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{1,3})?")
_THOUSANDS = re.compile(r"[+-]?\d{1,3}(?:,\d{3})+(?:\.\d*)?")
_IN_TEXT = re.compile(r"(?<![\w.])[-−]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:[eE][+-]?\d{1,3})?")
_LONGEST = 60
_SPELLED = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty"
)
_WORDS = _SPELLED.split()
NUMBER_WORDS = {word: value for value, word in enumerate(_WORDS)} | {"none": 0}


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
    text = text.removesuffix("%").strip().strip("$€£¥").strip()
    if _THOUSANDS.fullmatch(text):
        text = text.replace(",", "")
    value = float(text) if _NUMBER.fullmatch(text) else math.nan
    return Figure(value, percent) if math.isfinite(value) else None


def last_number(text: str) -> float | None:
    """The last number in a text; of a text without digits the last number word up to twenty."""
    found = [each for each in _IN_TEXT.findall(text[-2000:]) if len(each) <= _LONGEST]
    if found:
        value = float(found[-1].replace(",", "").replace("−", "-"))
        return value if math.isfinite(value) else None
    spoken = [NUMBER_WORDS[word] for word in re.findall(r"[a-z]+", text[-2000:].lower()) if word in NUMBER_WORDS]
    return float(spoken[-1]) if spoken else None


def close(gold: float, value: float, tolerance: float) -> bool:
    """Whether two numbers differ by at most `tolerance` times the reference."""
    return abs(value - gold) <= max(tolerance, 1e-9) * abs(gold)
