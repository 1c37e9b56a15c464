"""Plain numbers as exact fractions, with a percent sign or a unit."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise

from rollmill_grading.normalization import has_cjk, to_half_width
from rollmill_grading.numerals import to_digits

# Units of measurement in answers: their dimensions and sizes in base units, as exact fractions.

_INCH, _POUND = Fraction(254, 10000), Fraction(45359237, 10**5)
_TABLE: dict[str, dict[str, int | Fraction]] = {
    "length": {
        "m meter metre 米": 1,
        "nm": Fraction(1, 10**9),
        "\\mum μm µm": Fraction(1, 10**6),
        "mm millimeter millimetre 毫米": Fraction(1, 1000),
        "cm centimeter centimetre 厘米": Fraction(1, 100),
        "dm decimeter decimetre 分米": Fraction(1, 10),
        "km kilometer kilometre 千米 公里": 1000,
        "in inch inches": _INCH,
        "ft foot feet": 12 * _INCH,
        "yd yard": 36 * _INCH,
        "mi mile": 63360 * _INCH,
    },
    "mass": {
        "g gram 克": 1,
        "mg milligram 毫克": Fraction(1, 1000),
        "kg kilogram 千克 公斤": 1000,
        "t tonne 吨": 10**6,
        "oz ounce": _POUND / 16,
        "lb lbs pound": _POUND,
    },
    "time": {
        "s sec second 秒": 1,
        "ms millisecond": Fraction(1, 1000),
        "min minute 分钟": 60,
        "h hr hrs hour 小时": 3600,
        "day 天": 86400,
        "week 周": 604800,
    },
    "calendar": {"month": 1, "year yr": 12, "decade": 120, "century centuries": 1200},
    "dollar": {"$ dollar usd buck": 1, "cent ¢ penny pennies": Fraction(1, 100)},
    "euro": {"€ euro eur": 1},
    "sterling": {"£ gbp": 1},
    "yuan": {"¥ yuan rmb 元": 1},
    "angle": {"° degree deg 度": 1},
    "celsius": {"°c celsius": 1},
    "fahrenheit": {"°f fahrenheit": 1},
    "force": {"N newton": 1, "kN": 1000},
    "energy": {"J joule": 1, "kJ kilojoule": 1000},
    "power": {"W watt": 1, "kW kilowatt": 1000},
}
_LITRE = Fraction(1, 1000)
_GALLON = 231 * _INCH**3
_DERIVED: dict[str, tuple[dict[str, int], Fraction]] = {
    "l L liter litre 升": ({"length": 3}, _LITRE),
    "ml mL milliliter millilitre 毫升": ({"length": 3}, _LITRE / 1000),
    "gal gallon": ({"length": 3}, _GALLON),
    "qt quart": ({"length": 3}, _GALLON / 4),
    "pt pint": ({"length": 3}, _GALLON / 8),
    "平方米": ({"length": 2}, Fraction(1)),
    "平方厘米": ({"length": 2}, Fraction(1, 10**4)),
    "立方米": ({"length": 3}, Fraction(1)),
    "立方厘米": ({"length": 3}, Fraction(1, 10**6)),
    "ha hectare": ({"length": 2}, Fraction(10**4)),
    "acre": ({"length": 2}, 43560 * (12 * _INCH) ** 2),
    "mph": ({"length": 1, "time": -1}, 63360 * _INCH / 3600),
    "kph kmh": ({"length": 1, "time": -1}, Fraction(1000, 3600)),
}
_NAMED = {name: (powers, factor) for names, (powers, factor) in _DERIVED.items() for name in names.split()} | {
    name: ({measured: 1}, Fraction(factor))
    for measured, table in _TABLE.items()
    for names, factor in table.items()
    for name in names.split()
}
_TOKEN = re.compile(
    r"\s*(?:(?P<word>\\mu ?m|°[CF]?|[$€£¥¢]|[^\W\d_]+)\.?|(?P<power>\^\{?-?\d\}?)|(?P<over>/)|(?P<times>[·*]|\\cdot))"
)
_POWERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
_AFTER = {"squared": 2, "cubed": 3}


@dataclass(frozen=True, slots=True)
class Unit:
    """A dimension (powers of base measures, or a counted thing) and the size in base units."""

    measure: frozenset[tuple[str, int]]
    size: Fraction


def counted_unit(thing: str) -> Unit:
    """Return the unit of a countable thing: `apple`."""
    return Unit(frozenset({(thing, 1)}), Fraction(1))


@lru_cache(maxsize=4096)
def parse_unit(text: str) -> Unit | None:
    """Parse a unit such as `km/h`, `square feet`, `m^{2}` or `miles per hour`; None if a part is unknown."""
    powers: dict[str, int] = {}
    size, at, sign, next_power = Fraction(1), 0, 1, 1
    last: tuple[dict[str, int], Fraction] | None = None
    while at < len(text):
        token = _TOKEN.match(text, at)
        if token is None:
            return None
        at = token.end()
        word = token["word"]
        if token["over"] or word == "per":
            sign, last = -1, None
        elif token["times"]:
            last = None
        elif word in _POWERS:
            next_power = _POWERS[word]
        elif token["power"] or word in _AFTER:
            if last is None:
                return None
            power = _AFTER[word] if word else int(token["power"].strip("^{}"))
            size *= last[1] ** (sign * (power - 1))
            _add(powers, last[0], sign * (power - 1))
            last = None
        else:
            last = _known(word.replace(" ", ""))
            if last is None:
                return None
            size *= last[1] ** (sign * next_power)
            _add(powers, last[0], sign * next_power)
            next_power = 1
    found = frozenset((name, power) for name, power in powers.items() if power)
    return Unit(found, size) if found else None


def _known(word: str) -> tuple[dict[str, int], Fraction] | None:
    lower = word.lower()
    return (
        _NAMED.get(word)
        or _NAMED.get(lower)
        or (_NAMED.get(lower[:-1]) if len(lower) > 3 and lower[-1] == "s" else None)
    )


def _add(powers: dict[str, int], unit: dict[str, int], times: int) -> None:
    for name, power in unit.items():
        powers[name] = powers.get(name, 0) + power * times


_MOST_DIGITS = 400
"""Longer numbers are left to the grader process, which can be killed."""

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+|\d{1,3}(?: \d{3})+|\d+)"
_DECIMAL = rf"(?:{_DIGITS}(?:\.\d*)?|\.\d+)"
_POWER = r"(?:[eE](?P<e>[+-]?\d{1,3})|(?:\\times|\\cdot|\*|x)10\^\{?(?P<t>[+-]?\d{1,3})\}?)"
_SPACE = re.compile(r"\s+")
_INTEGER = re.compile(r"[+-]?[0-9]+")
_PLAIN = re.compile(rf"(?P<sign>[+-]*)(?P<number>{_DECIMAL}){_POWER}?")
_REPEATING = re.compile(
    r"(?P<sign>[+-]*)(?P<whole>\d+)\.(?P<fixed>\d*)\\(?:overline|bar|dot)(?:\{(?P<again>\d+)\}|(?P<digit>\d))"
)
_SLASHED = re.compile(rf"(?P<sign>[+-]*)(?:(?P<whole>\d+)(?: and)? )?(?P<top>{_DECIMAL})/(?P<bottom>-?{_DECIMAL})")
_FRAC = re.compile(
    rf"(?P<sign>[+-]*)(?P<whole>\d*)\\frac(?:\{{(?P<top>-?{_DIGITS})\}}\{{(?P<bottom>-?{_DIGITS})\}}|(?P<t>\d)(?P<b>\d))"
)

_WRAPPED = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|textnormal|operatorname|mbox|emph)\s*\{([^{}]*)\}")
_SPACES = re.compile(
    r"(?<!\\)\\[ ,;:!]|\\(?:quad|qquad|left|right|big|Big|displaystyle|rm)(?![A-Za-z])|\{,\}|~|[\u00a0\u2009\u202f]"
)
_SYMBOLS = {
    **{"−": "-", "–": "-", "×": "\\times ", "·": "\\cdot ", "⋅": "\\cdot ", "÷": "/", "π": "\\pi ", "∞": "\\infty "},
    **{"≤": "\\le ", "≥": "\\ge ", "≠": "\\neq ", "∪": "\\cup ", "∩": "\\cap ", "∈": "\\in ", "±": "\\pm "},
    **{"∅": "\\emptyset ", "½": "\\frac12", "¼": "\\frac14", "¾": "\\frac34"},
    **{"，": ",", "；": ";", "：": ":", "（": "(", "）": ")", "％": "%", "＝": "=", "。": "."},
}
_TRANSLATION = str.maketrans(_SYMBOLS)
_SPECIAL = re.compile(r"[\\*{~$]|[^\x00-\x7f]")
"""A character without which a text has no LaTeX or Markdown to strip."""
_RAISED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
_CURRENCY = re.compile(r"([+-]?) ?([$€£¥]) ?(?=[+-]?[\d.])")
_BEFORE_UNIT = re.compile(r"[\d.}](\s*)(?=[^\W\d_]|[%°¢€£¥$]|\\mu)")
_COUNTED = re.compile(r"[^\W\d_][^\d=<>+*^{}\[\]()\\,;!|]{0,60}|°[CF]?")
_LONE_LETTER_UNITS = frozenset("mgsLlhNJWKVACF")
_SHORT_UNITS = frozenset(
    [
        "am",
        "pm",
        "cm",
        "mm",
        "dm",
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
        "mph",
        "kmh",
        "pcs",
        "yrs",
        "tv",
        *("cc", "px", "kb", "mb", "gb", "tb", "ns", "au", "ly", "lt", "pc", "nc"),
        "pts",
        "usd",
        "eur",
    ]
)
_NO_UNITS = frozenset(["or", "and", "to", "not", "pi", "sqrt", "log", "ln", "sin", "cos", "tan", "exp"])
_VARIABLES = frozenset("abcnxyz")
_PRODUCT = re.compile(
    r"(?:[a-z]|[b-df-hj-np-tv-xz]{2,3}|[aeiou][b-df-hj-np-tv-xz]|[b-df-hj-np-tv-xz][aeiou]|[A-Z]{2})(?:['_ /]|$)"
)
"""Letters that are a product of variables rather than a word."""
_PERCENT = re.compile(r"%|per ?cent|pct", re.IGNORECASE)
_CHANGE = re.compile(r"(.*(?:%|per ?cent)) ([a-z]{3,}(?: [a-z]+){0,3})", re.IGNORECASE)
"""A percentage with words behind it: `25% increase`, which is not a `25% decrease`."""
_PART = re.compile(r"(\d[\d,]*(?:\.\d+)?(?: \d+/\d+)?) ?([A-Za-z]+)\.?(?:,? and |, | |$)")


@dataclass(frozen=True, slots=True)
class Quantity:
    """A plain number, with a percent sign or a unit if the text has one."""

    value: Fraction
    percent: bool = False
    unit: Unit | None = None


@lru_cache(256)
def normalize_answer(text: str) -> str:
    """Strip LaTeX spacing, text wrappers and delimiters; equal results are equal answers.

    A dollar sign is kept as money if it is escaped, or before a number without a second one that closes it.
    """
    if _SPECIAL.search(text):
        text = _strip_latex(text)
    text = " ".join(text.split()).rstrip(" .,;:").lstrip(" ,;:")
    return text if re.match(r"\.\d", text) else text.lstrip(" .,;:")


def _strip_latex(text: str) -> str:
    text = to_half_width(text).translate(_TRANSLATION)
    text = re.sub(r"[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+", lambda found: "^{" + found[0].translate(_RAISED) + "}", text)
    text = text.replace("{,}", ",").replace("\\!", "")
    text = re.sub(r"(?<=[\w)])\*\*(?=[\w({-])", "^", text).replace("**", "")
    text = re.sub(r"(?<=\d)\\[,;: ](?=\d{3}(?!\d))", ",", text)
    text = re.sub(r"\\begin\{array\}\{[^{}]*\}", r"\\begin{array}", _SPACES.sub(" ", text))
    text = _WRAPPED.sub(r" \1 ", text)
    text = re.sub(r"\\[dt]frac", r"\\frac", text)
    text = re.sub(r"\^\s*\{?\s*\\circ\s*\}?|\\degree|º", "°", text).replace("\\%", "%")
    text = re.sub(r"(?<!\\)\\[()]|(?<!\\)\\[\[\]]", " ", text)
    if text.count("$") - text.count("\\$") != 1 or not re.search(r"(?<!\\)\$ ?[\d.]", text):
        text = re.sub(r"(?<!\\)\$", " ", text)
    return text.replace("\\$", "$")


_APPROXIMATELY = re.compile(
    r"^(?:=>?|\\approx(?![A-Za-z])|≈|~|\\sim(?:eq)?(?![A-Za-z])|约(?:为|是)?|approximately|about|around|roughly) ?",
    re.IGNORECASE,
)


def strip_approximation(text: str) -> str:
    """Remove "about", an approximation or an equals sign before a normalised text."""
    return _APPROXIMATELY.sub("", text, count=1)


def strip_spaces(text: str) -> str:
    """Remove the spaces of a normalised text for comparison, without merging two numbers."""
    if _SPACE.search(text):
        text = _SPACE.sub("", re.sub(r"(?<=\d)\s+(?=\d)", "_", text))
    return text[1:-1] if text.startswith("{") and re.fullmatch(r"\{[^{}]*\}", text) else text


def parse_quantity(text: str) -> Quantity | None:
    """Parse a normalised text as a plain number: thousands separators, fractions, exponents, percent, a unit."""
    text = to_digits(text)
    change = _CHANGE.fullmatch(text)
    if change is not None and (found := parse_quantity(change[1])) is not None and found.percent:
        return replace(found, unit=counted_unit(_singular(change[2])))
    number, unit = split_unit(text)
    value = _fraction(number)
    if value is not None:
        return Quantity(value, percent=unit == "%", unit=unit if isinstance(unit, Unit) else None)
    return _compound(text)


def quantities_equal(gold: Quantity, answer: Quantity, *, slack: Fraction, units_required: bool = False) -> bool:
    """True if two quantities are equal within the relative difference `slack`.

    A missing unit matches any unless units are required; a missing percent sign matches both readings.
    """
    value = answer.value
    if gold.unit is not None and answer.unit is not None:
        if gold.unit.measure != answer.unit.measure:
            return False
        value *= answer.unit.size / gold.unit.size
    elif units_required and (gold.unit is not None or gold.percent > answer.percent):
        return False
    readings = {value}
    if gold.percent != answer.percent:
        if gold.unit is not None or answer.unit is not None:
            return False
        readings |= {value / 100} if answer.percent else {value * 100}
        if units_required and gold.percent:
            return False
    return any(abs(gold.value - reading) <= slack * abs(gold.value) for reading in readings)


def split_unit(text: str) -> tuple[str, Unit | str | None]:
    """Split a normalised text into its number or formula, and its unit, "%" or None."""
    money = _CURRENCY.match(text)
    if money is not None:
        behind, also = split_unit(money[1] + text[money.end() :])
        symbol = parse_unit(money[2])
        if isinstance(also, Unit) and symbol is not None and re.search(r"\bper |/", text):
            also = symbol  # `$16 per week`
        is_word = isinstance(also, Unit) and parse_unit(str(next(iter(also.measure))[0])) is None
        return (behind, symbol) if also is None or also == symbol or is_word else (text, None)
    for match in _BEFORE_UNIT.finditer(text):
        words = text[match.end() :]
        if _PERCENT.fullmatch(words):
            return text[: match.end()].strip(), "%"
        unit = _unit(words, spaced=bool(match[1]))
        if unit is not None:
            return text[: match.end()].strip(), unit
    return text, None


def _unit(text: str, *, spaced: bool) -> Unit | None:
    if len(text) > 62:
        return None
    words = re.sub(r"^degrees? (?=[CF]$)", "°", re.sub(r"^degrees? (?=[CF]\w)", "", text, flags=re.IGNORECASE))
    words = re.sub(r"\s*\^\s*", "^", words.lower() if len(words.split()) > 1 else words)
    if len(text) == 1 and text.isascii() and text.isalpha() and not (spaced and text in _LONE_LETTER_UNITS):
        return None
    first = re.split(r"[ /^]", words)[0]
    if (
        has_cjk(first)
        or first in "°%¢€£¥$"
        or spaced
        or len(first) > 3
        or first.lower() in _SHORT_UNITS
        or first[0] == "°"
    ):
        known = parse_unit(words)
        if known is not None:
            return known
    return _counted(text, spaced=spaced)


def _counted(text: str, *, spaced: bool) -> Unit | None:
    words = text.lower().split()
    if _COUNTED.fullmatch(text) is None or not _NO_UNITS.isdisjoint(words):
        return None
    if words[0] not in _SHORT_UNITS and (set(words[0]) <= _VARIABLES or _PRODUCT.match(text)):
        return None
    if not spaced and not has_cjk(words[0]) and len(words[0]) <= 3 and words[0] not in _SHORT_UNITS:
        return None
    return counted_unit(_singular(text))


def _singular(unit: str) -> str:
    unit = unit.lower().replace(".", "").removeprefix("°")
    return unit[:-1] if len(unit) > 3 and unit.endswith("s") else unit


def _compound(text: str) -> Quantity | None:
    """Parse `2 hours 30 minutes`, `5 feet 6 inches`: parts of one measure, largest first; in the unit of the last."""
    parts, at = [], 0
    while at < len(text):
        part = _PART.match(text, at)
        if part is None or (unit := parse_unit(part[2])) is None or (value := _fraction(part[1])) is None:
            return None
        parts.append((value, unit))
        at = part.end()
    units = [unit for _, unit in parts]
    falling = all(a.measure == b.measure and a.size > b.size for a, b in pairwise(units))
    if len(parts) < 2 or not falling:
        return None
    return Quantity(sum((value * unit.size for value, unit in parts), Fraction(0)) / units[-1].size, unit=units[-1])


def _fraction(text: str) -> Fraction | None:
    if len(text) > _MOST_DIGITS:
        return None
    if _INTEGER.fullmatch(text):
        return Fraction(int(text))
    text = re.sub(r"^([+-]) ", r"\1", text.strip())
    text = re.sub(r"^\{([^{}]*)\}|^\(([^(),]*)\)$", r"\1\2", text)
    text = re.sub(r"^([+-]*)10\^(?=\{?[+-]?\d)", r"\g<1>1*10^", text)
    plain = _PLAIN.fullmatch(re.sub(r" ?(\\times|\\cdot|\*|x) ?", r"\1", text))
    if plain is not None:
        exponent = int(plain["e"] or plain["t"] or 0)
        digits = re.sub("[, ]", "", plain["number"]).rstrip(".")
        return _signed(plain["sign"], Fraction(digits) * Fraction(10) ** exponent)
    repeating = _REPEATING.fullmatch(text)
    if repeating is not None:
        fixed, again = repeating["fixed"], repeating["again"] or repeating["digit"]
        tail = Fraction(int(again), 10 ** len(again) - 1)
        return _signed(repeating["sign"], Fraction(f"{repeating['whole']}.{fixed}0") + tail / 10 ** len(fixed))
    slashed = re.sub(r" ?/ ?", "/", text)
    parts = _SLASHED.fullmatch(slashed) or _FRAC.fullmatch(re.sub(r"(?<!\d) | (?!\d)", "", text))
    return None if parts is None else _ratio(parts.groupdict())


def _ratio(groups: dict[str, str | None]) -> Fraction | None:
    top, bottom = (
        Fraction(re.sub("[, ]", "", groups[long] or groups.get(short) or "0").rstrip("."))
        for long, short in (("top", "t"), ("bottom", "b"))
    )
    if bottom == 0:
        return None
    return _signed(groups["sign"] or "", int(groups["whole"] or 0) + top / bottom)


def _signed(sign: str, value: Fraction) -> Fraction:
    return -value if sign.count("-") % 2 else value
