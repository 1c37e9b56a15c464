"""Numbers as written in charts, tables and captions."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from rollmill_grading.normalization import to_half_width
from rollmill_grading.quantities import normalize_answer, parse_quantity, strip_approximation

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
