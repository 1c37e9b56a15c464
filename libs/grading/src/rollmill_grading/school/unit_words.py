"""Unit words of both languages, and conversion by pint (extra `units`).

Only words of the table below reach pint, because it evaluates expressions.
"""

from __future__ import annotations

import re
from fractions import Fraction
from functools import lru_cache
from typing import Any

from rollmill_grading.errors import MissingPintError

UnitPowers = tuple[tuple[str, int], ...]
"""pint unit names with their powers: kilometres per hour are (("kilometer", 1), ("hour", -1))."""

_TABLE = """
nanometer: nm nanometer nanometre 纳米
micrometer: μm µm \\mum um micrometer micrometre 微米
millimeter: mm millimeter millimetre 毫米
centimeter: cm CM centimeter centimetre 厘米 公分
decimeter: dm decimeter decimetre 分米
meter: m meter metre 米 公尺
kilometer: km KM Km kilometer kilometre 千米 公里
li: 里 华里
inch: in inch inches 英寸
foot: ft foot feet 英尺
yard: yd yard 码
mile: mi mile 英里
light_year: ly light-year 光年
hectare: ha hectare 公顷
acre: acre 英亩
mu: 亩
milliliter: ml mL ML milliliter millilitre 毫升
liter: l L liter litre 升
microgram: μg µg ug microgram 微克
milligram: mg milligram 毫克
gram: g gram 克
kilogram: kg Kg KG kilogram kilo 千克 公斤
metric_ton: t ton tonne 吨
jin: 斤 市斤
liang: 两
ounce: oz ounce 盎司
pound: lb lbs pound 磅
millisecond: ms millisecond 毫秒
second: s sec second 秒 秒钟
minute: min minute 分 分钟
hour: h hr hour 时 小时 个小时 钟头 个钟头
day: d day 天 日
week: week 周 星期 个星期
month: month 月 个月
year: yr year 年
newton: N newton 牛 牛顿
kilonewton: kN 千牛
joule: J joule 焦 焦耳
kilojoule: kJ kilojoule 千焦
megajoule: MJ 兆焦
calorie: cal calorie 卡 卡路里
kilocalorie: kcal kilocalorie 千卡 大卡
electron_volt: eV 电子伏
kilowatt_hour: kWh 千瓦时 度 度电
milliwatt: mW
watt: W watt 瓦 瓦特
kilowatt: kW kilowatt 千瓦
megawatt: MW 兆瓦
pascal: Pa pascal 帕 帕斯卡
kilopascal: kPa 千帕
megapascal: MPa 兆帕
hectopascal: hPa 百帕
standard_atmosphere: atm 标准大气压
milliampere: mA milliampere 毫安
ampere: A amp ampere 安 安培
millivolt: mV 毫伏
volt: V volt 伏 伏特
kilovolt: kV 千伏
ohm: Ω ohm \\Omega 欧 欧姆
kiloohm: kΩ 千欧
coulomb: C coulomb 库 库仑
farad: F farad 法拉
tesla: T tesla 特斯拉
hertz: Hz hertz 赫 赫兹
kilohertz: kHz 千赫
megahertz: MHz 兆赫
mole: mol mole 摩尔
millimole: mmol
degree: ° deg degree 度
degree_Celsius: °C celsius 摄氏度 度
degree_Fahrenheit: °F fahrenheit 华氏度
kelvin: K kelvin 开 开尔文
yuan: 元 块 块钱 元钱 yuan RMB ¥
jiao: 角 毛 毛钱 角钱
fen: 分 分钱
us_dollar: dollar USD $ 美元
us_cent: cent ¢ 美分
euro: euro EUR € 欧元
sterling: GBP £ 英镑
"""
_OWN = ("li = 500 * meter", "mu = 2000 / 3 * meter ** 2", "jin = 500 * gram", "liang = 50 * gram")
_MONEY = (
    "yuan = [yuan]",
    "jiao = yuan / 10",
    "fen = yuan / 100",
    "us_dollar = [us_dollar]",
    "us_cent = us_dollar / 100",
)
_NAMES: dict[str, list[str]] = {}
for _line in _TABLE.strip().splitlines():
    _name, _, _words = _line.partition(": ")
    for _word in _words.split():
        _NAMES.setdefault(_word, []).append(_name)

_POWERS = {"square ": 2, "sq ": 2, "sq. ": 2, "cubic ": 3, "cu ": 3, "平方": 2, "立方": 3}
_ANY_WORD = "|".join(re.escape(word) for word in sorted(_NAMES, key=len, reverse=True))
_PART = (
    rf"(?:(?i:square|sq\.?|cubic|cu) |平方|立方)?"
    rf"(?:(?:{_ANY_WORD})(?![A-Za-z])|(?i:[a-z]{{3,12}}(?:-years?)?)(?![A-Za-z]))"
    rf"(?: ?\^ ?\{{?-?[1-4]\}}?|[1-4](?!\d)|²|³| squared| cubed)?"
)
_BETWEEN = r" ?(?:/|\\cdot|·|\*|每|(?i:per)(?![A-Za-z])) ?"
UNIT_PATTERN = rf"{_PART}(?:{_BETWEEN}{_PART}){{0,3}}"
"""Regular expression of a possible unit; `parse_units` decides whether it is one. Linear."""

_SPLIT = re.compile(rf"({_BETWEEN})")
_WORD_OF = re.compile(
    r"(?P<before>(?i:square|sq\.?|cubic|cu) |平方|立方)?(?P<word>.*?)"
    r"(?P<power> ?\^ ?\{?-?[1-4]\}?|(?<!\d)[1-4]|²|³| squared| cubed)?"
)


@lru_cache(maxsize=4096)
def parse_units(text: str) -> tuple[UnitPowers, ...]:
    """Return the meanings of `km/h`, `平方厘米` or `分`: several if a word is ambiguous, none for other texts."""
    pieces = _SPLIT.split(text.strip())
    found: list[dict[str, int]] = [{}]
    sign = 1
    for index, piece in enumerate(pieces):
        if index % 2:
            sign = -1 if piece.strip().lower() in ("/", "每", "per") else sign
            continue
        names, power = _named(piece)
        found = [_with(powers, name, sign * power) for powers in found for name in names]
    return tuple(tuple(sorted(powers.items())) for powers in found)


def _named(piece: str) -> tuple[list[str], int]:
    match = _WORD_OF.fullmatch(piece.strip())
    if match is None:
        return [], 1
    word, power = match["word"], 1
    if match["before"]:
        power = _POWERS.get(match["before"].lower(), 2)
    elif match["power"]:
        power = {"²": 2, "³": 3, " squared": 2, " cubed": 3}.get(match["power"]) or int(match["power"].strip("^ {}"))
    names = _NAMES.get(word) or _NAMES.get(word.lower() if len(word) > 2 else word)
    if names is None and len(word) > 3 and word[-1] in "sS":
        names = _NAMES.get(word[:-1]) or _NAMES.get(word[:-1].lower())
    return names or [], power


def _with(powers: dict[str, int], name: str, power: int) -> dict[str, int]:
    return powers | {name: powers.get(name, 0) + power}


@lru_cache(maxsize=1)
def _registry() -> Any:
    """Return pint's registry with exact fractions, Chinese units and money. Takes a third of a second once."""
    try:
        import pint
    except ModuleNotFoundError as error:
        raise MissingPintError from error
    registry: Any = pint.UnitRegistry(non_int_type=Fraction, cache_folder=None)
    for line in (*_OWN, *_MONEY, "euro = [euro]", "sterling = [sterling]"):
        registry.define(line)
    return registry


def load_pint() -> None:
    """Load pint, which blocks for a moment. Raises MissingPintError if it is not installed."""
    _registry()


@lru_cache(maxsize=4096)
def _pint(unit: UnitPowers) -> Any:
    registry = _registry()
    product = registry.Unit("dimensionless")
    for name, power in unit:
        product *= registry.Unit(name) ** power
    return product


def convert_unit(value: Fraction, unit: UnitPowers, to: UnitPowers) -> Fraction | None:
    """Convert a value to another unit, exactly; None if they measure different things. 20 °C is 293.15 K."""
    if unit == to:
        return value
    one, other = _pint(unit), _pint(to)
    if one.dimensionality != other.dimensionality or {"degree"} & {name for name, _ in (*unit, *to)}:
        return None
    try:
        return Fraction(_registry().Quantity(value, one).to(other).magnitude)
    except (ArithmeticError, ValueError, TypeError):  # a difference of temperatures cannot be converted to kelvin
        return None
