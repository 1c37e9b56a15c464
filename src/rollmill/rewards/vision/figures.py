"""Numbers as charts, tables and captions write them."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from rollmill.rewards.answers.normalization import to_half_width
from rollmill.rewards.answers.quantities import normalize_answer, parse_quantity

_NUMBER = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{1,3})?")
_THOUSANDS = re.compile(r"[+-]?\d{1,3}(?:,\d{3})+(?:\.\d*)?")
_CURRENCY = re.compile(r"^([+-]?)\s*[$€£¥]\s*([+-]?)(?=[\d.])")
_ROUGHLY = re.compile(r"^(?:=>?|≈|~|about|approximately|around|roughly|约)\s*", re.IGNORECASE)
_LONGEST = 60


@dataclass(frozen=True, slots=True)
class ChartNumber:
    """A number, and whether a percent sign stands behind it; `value` is the number before that sign."""

    value: float
    percent: bool = False

    @property
    def share(self) -> float:
        """25 % is .25."""
        return self.value / 100 if self.percent else self.value


def parse_chart_number(text: str) -> ChartNumber | None:
    """The number that a text is as a whole; signs of currencies and commas between thousands do not count."""
    text = to_half_width(text).strip()
    if len(text) > _LONGEST:
        return None
    text = text.replace("−", "-").rstrip(".")
    percent = text.endswith("%")
    text = _CURRENCY.sub(r"\1\2", text.removesuffix("%").strip().rstrip("$€£¥ "))
    if _THOUSANDS.fullmatch(text):
        text = text.replace(",", "")
    value = float(text) if _NUMBER.fullmatch(text) else math.nan
    return ChartNumber(value, percent) if math.isfinite(value) else None


def find_stated_number(text: str) -> ChartNumber | None:
    """The number that an answer states, also with a unit or in words: `1.2 million`, `12元`, `一万五千`."""
    text = _ROUGHLY.sub("", text.strip(), count=1)
    found = parse_chart_number(text)
    if found is not None or len(text) > _LONGEST:
        return found
    amount = parse_quantity(normalize_answer(text))
    return None if amount is None or abs(amount.value) > 1e300 else ChartNumber(float(amount.value), amount.percent)


def within_tolerance(gold: float, value: float, tolerance: float) -> bool:
    """Whether two numbers differ by at most `tolerance` times the reference."""
    return abs(value - gold) <= max(tolerance, 1e-9) * abs(gold)
