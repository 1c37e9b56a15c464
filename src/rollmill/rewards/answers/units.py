"""Units of measurement in answers: what they measure and how many base units they are, as exact fractions."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

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
    """What is measured (powers of base measures, or a counted thing) and the size in base units."""

    measure: frozenset[tuple[str, int]]
    size: Fraction


def counted_unit(thing: str) -> Unit:
    """The unit of something that is no measure: `apple`."""
    return Unit(frozenset({(thing, 1)}), Fraction(1))


@lru_cache(maxsize=4096)
def parse_unit(text: str) -> Unit | None:
    """The unit that a text like `km/h`, `square feet`, `m^{2}` or `miles per hour` is; None where a part is unknown."""
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
