"""Answers that are plain numbers, as exact fractions, and what else can be told from the text of an answer."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

_MOST_DIGITS = 400
"""Longer numbers are left to the grader process, which can be killed."""

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+|\d+)"
_DECIMAL = rf"(?:{_DIGITS}(?:\.\d*)?|\.\d+)"
_POWER = r"(?:[eE](?P<e>[+-]?\d{1,3})|(?:\\times|\*|x|×)10\^\{?(?P<t>[+-]?\d{1,3})\}?)"
_PLAIN = re.compile(rf"(?P<sign>[+-]*)(?P<number>{_DECIMAL}){_POWER}?")
_SLASHED = re.compile(r"(?P<sign>[+-]*)(?:(?P<whole>\d+) )?(?P<top>\d+)/(?P<bottom>-?\d+)")
_FRAC = re.compile(r"(?P<sign>[+-]*)(?P<whole>\d*)\\frac(?:\{(?P<top>-?\d+)\}\{(?P<bottom>-?\d+)\}|(?P<t>\d)(?P<b>\d))")

_WRAPPED = re.compile(r"\\(?:text|textbf|mathrm|mathbf|textnormal|operatorname|mbox)\s*\{([^{}]*)\}")
_SPACES = re.compile(r"\\[ ,;:!]|\\(?:quad|qquad|left|right|big|Big|displaystyle)(?![A-Za-z])|\{,\}|~")
_BEFORE_UNIT = re.compile(r"[\d.}](\s*)(?=[^\W\d_]|%|°)")
_UNIT = re.compile(r"[^\W\d_][^\d=<>+*^{}\[\]()\\,;]{0,60}|%|°[CF]?")
_LONE_LETTER_UNITS = frozenset("mgsLlhNJWKVACF")
_SHORT_UNITS = frozenset(
    {
        "am",
        "pm",
        "cm",
        "mm",
        "km",
        "nm",
        "kg",
        "mg",
        "ml",
        "hr",
        "hrs",
        "min",
        "sec",
        "ft",
        "in",
        "lb",
        "lbs",
        "oz",
        "mi",
    }
    | {"mph", "kmh", "usd", "eur"}
)
_NO_UNITS = frozenset(["or", "and", "to", "not", "pi", "sqrt", "log", "ln", "sin", "cos", "tan", "exp"])
_VARIABLES = frozenset("abcnxyz")


@dataclass(frozen=True, slots=True)
class Quantity:
    """A plain number, with a percent sign or a unit (singular, lower case) where the text has one."""

    value: Fraction
    percent: bool = False
    unit: str = ""


def normalised(text: str) -> str:
    """The text without LaTeX spacing, text wrappers and delimiters; equal strings are equal answers."""
    text = text.replace("{,}", ",").replace("\\!", "").replace("−", "-").replace("–", "-")
    text = re.sub(r"(?<=[\w)])\*\*(?=[\w({-])", "^", text).replace("**", "")
    text = re.sub(r"(?<=\d)\\[,;: ](?=\d{3}(?!\d))", ",", text)
    text = _SPACES.sub(" ", text)
    text = _WRAPPED.sub(r" \1 ", text)
    text = re.sub(r"\\[dt]frac", r"\\frac", text)
    text = re.sub(r"\^\{?\\circ\}?|\\degree", "°", text).replace("\\%", "%").replace("\\$", "$")
    text = re.sub(r"\\[()\[\]]|\$", " ", text)
    return " ".join(text.split()).strip(" .,;:")


def squeezed(text: str) -> str:
    """A normalised text without any space, for comparing."""
    text = re.sub(r"\s+", "", text)
    return text[1:-1] if re.fullmatch(r"\{[^{}]*\}", text) else text


def quantity(text: str) -> Quantity | None:
    """The plain number that a normalised text is: thousands separators, fractions, exponents, percent, a unit."""
    number, unit = _split_unit(text)
    value = _fraction(number)
    if value is None:
        return None
    if unit == "%":
        return Quantity(value, percent=True)
    return Quantity(value, unit=unit)


def agree(gold: Quantity, answer: Quantity, *, slack: Fraction) -> bool:
    """Whether two quantities are the same. A missing unit agrees with any, a missing percent sign with both readings.

    `slack` is the relative difference allowed.
    """
    if gold.unit and answer.unit and gold.unit != answer.unit:
        return False
    readings = {answer.value}
    if gold.percent != answer.percent:
        readings |= {answer.value / 100} if answer.percent else {answer.value * 100}
    return any(abs(gold.value - reading) <= slack * abs(gold.value) for reading in readings)


def _split_unit(text: str) -> tuple[str, str]:
    for match in _BEFORE_UNIT.finditer(text):
        unit = text[match.end() :]
        if _UNIT.fullmatch(unit) and _is_unit(unit, spaced=bool(match[1])):
            return text[: match.end()].strip(), _singular(unit)
    return text, ""


def _is_unit(unit: str, *, spaced: bool) -> bool:
    if unit[0] in "%°":
        return True
    if len(unit) == 1:
        return spaced and unit in _LONE_LETTER_UNITS
    words = unit.lower().split()
    if not _NO_UNITS.isdisjoint(words) or set(words[0]) <= _VARIABLES:
        return False
    return spaced or len(words[0]) > 3 or words[0] in _SHORT_UNITS


def _singular(unit: str) -> str:
    unit = unit.lower().replace(".", "").removeprefix("°")
    return unit[:-1] if len(unit) > 3 and unit.endswith("s") else unit


def _fraction(text: str) -> Fraction | None:
    if len(text) > _MOST_DIGITS:
        return None
    text = re.sub(r"^([+-]) ", r"\1", text.strip())
    text = re.sub(r"^([+-]*)10\^(?=\{?[+-]?\d)", r"\g<1>1*10^", text)
    plain = _PLAIN.fullmatch(text.replace(" ", ""))
    if plain is not None and " " not in re.sub(r" ?(\\times|\*|x|×) ?", "", text):
        exponent = int(plain["e"] or plain["t"] or 0)
        return _signed(
            plain["sign"], Fraction(plain["number"].replace(",", "").rstrip(".") or "0") * Fraction(10) ** exponent
        )
    parts = _SLASHED.fullmatch(re.sub(r" ?/ ?", "/", text)) or _FRAC.fullmatch(text.replace(" ", ""))
    if parts is None:
        return None
    groups = parts.groupdict()
    bottom = int(groups["bottom"] or groups.get("b") or 0)
    if bottom == 0:
        return None
    top = int(groups["top"] or groups.get("t") or 0)
    return _signed(parts["sign"], int(parts["whole"] or 0) + Fraction(top, bottom))


def _signed(sign: str, value: Fraction) -> Fraction:
    return -value if sign.count("-") % 2 else value
