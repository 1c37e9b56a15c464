"""Numbers in words: Chinese numerals and English number words."""

from __future__ import annotations

import re
from fractions import Fraction

_DIGITS = {sign: value for value, sign in enumerate("零一二三四五六七八九")} | {"〇": 0, "两": 2}
_PLACES = {"十": 10, "百": 100, "千": 1000}
_MYRIADS = {"万": 10**4, "亿": 10**8}
CHINESE_DIGITS = "零〇一二两三四五六七八九十百千万亿"
"""Characters of Chinese numerals, for character classes of regular expressions."""
_ONE_DIGIT = f"(?:[{CHINESE_DIGITS}](?<!千)|千(?![克米瓦]))"
CHINESE_NUMERAL = rf"{_ONE_DIGIT}{{1,20}}(?:分之[{CHINESE_DIGITS}]{{1,20}}|点[零〇一二三四五六七八九]{{1,20}})?"
"""Regular expression of a Chinese numeral, including fractions and decimals; 千克 is a unit. Linear."""
MEASURE_WORDS = "块个只条本页张人名位棵头匹辆台件支枝颗朵份袋箱盒瓶杯碗把次倍岁层排行组队双套节班题种根片粒座间盆筐桶"
"""Chinese measure words of one character."""

_SPELLED = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
)
_TENS = {
    word: 10 * n
    for n, word in enumerate(["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"], 2)
}
_SCALES = {"dozen": 12, "hundred": 100}
SCALES = {
    **{"万亿": 10**12, "千万": 10**7, "百万": 10**6, "十万": 10**5, "万": 10**4, "亿": 10**8},
    **{"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12},
}
"""Multipliers after a number, as in `1.2 million`, the longest first."""
SCALE = (
    rf"(?:{'|'.join(word for word in SCALES if not word.isascii())}|(?i:thousand|million|billion|trillion)(?![A-Za-z]))"
)
"""Regular expression of a key of `SCALES`."""
_LARGE = {"thousand": 1000, "million": 10**6, "billion": 10**9}
NUMBER_WORDS = {word: value for value, word in enumerate(_SPELLED.split())} | {"none": 0} | _TENS
"""English words of single numbers, in small letters."""
_ONE_WORD = rf"(?:{'|'.join(sorted({*NUMBER_WORDS, *_SCALES, *_LARGE} - {'none'}, key=len, reverse=True))})(?![A-Za-z])"
_PARTS = {"half": 2, "third": 3, "quarter": 4, "fourth": 4, "fifth": 5, "sixth": 6, "seventh": 7, "eighth": 8}
_PARTS |= {"halve": 2, "ninth": 9, "tenth": 10, "hundredth": 100}
ENGLISH_NUMERAL = (
    rf"(?<![A-Za-z-])(?:{_ONE_WORD}(?:(?:[ -]|(?<=hundred) and |(?<=thousand) and ){_ONE_WORD}){{0,12}}"
    rf"(?:[ -](?:{'|'.join(_PARTS)})s?(?![A-Za-z])| and a (?:half|quarter)(?![A-Za-z]))?)(?!-?[A-Za-z]*(?<=-)[A-Za-z])"
)
"""Regular expression of a number in English words: `one hundred and ten`, `two thirds`, `two and a half`."""
_SPELLED_NUMBER = re.compile(
    rf"(?:(?P<sign>negative|minus) )?(?:(?P<words>{ENGLISH_NUMERAL})|(?=[$\d.√\\(]))", re.IGNORECASE
)
_WORDS = re.compile(r"[a-z]+|[^\sa-z-]")
_SCALED = re.compile(rf"(?P<number>[+-]?[$€£¥]? ?\d[\d,]*(?:\.\d+)?) ?(?P<scale>{SCALE})")
_MIXED = re.compile(r"(?P<high>\d{1,8}(?:\.\d{1,4})?)万(?P<low>\d{1,4})(?P<place>[千百]?)")
_NUMERAL = re.compile(rf"(?P<sign>负|零下)?(?P<number>{CHINESE_NUMERAL})(?!(?!千[克米瓦])[{CHINESE_DIGITS}分点])")
_COUNTED = re.compile(rf"(?<![第{CHINESE_DIGITS}])(?:[{CHINESE_DIGITS}]{{1,20}})(?=[{MEASURE_WORDS}])")


def parse_chinese_numeral(text: str) -> Fraction | None:
    """`一百零五` is 105, `二〇二四` is 2024, `三点一四` is 3.14, `一万五` is 15000; None for other texts."""
    whole, point, decimals = text.partition("点")
    if (
        not whole
        or not set(whole) <= set(CHINESE_DIGITS)
        or not set(decimals) <= _DIGITS.keys()
        or (point and not decimals)
    ):
        return None
    if all(sign in _DIGITS for sign in whole):
        if len(whole) > 1 and "两" in whole:
            return None
        value = int("".join(str(_DIGITS[sign]) for sign in whole))
    else:
        value = _placed(whole)
    tail = "".join(str(_DIGITS[sign]) for sign in decimals)
    return Fraction(f"{value}.{tail}") if point else Fraction(value)


def _placed(whole: str) -> int:
    total = section = digit = 0
    for sign in whole:
        if sign in _DIGITS:
            digit = _DIGITS[sign]
        elif sign in _PLACES:
            section += (digit or 1) * _PLACES[sign]
            digit = 0
        else:
            smaller = total % _MYRIADS[sign]
            total += (smaller + section + digit) * _MYRIADS[sign] - smaller
            section = digit = 0
    if len(whole) > 1 and digit and (place := (_PLACES | _MYRIADS).get(whole[-2], 10)) > 10:
        digit *= place // 10  # `三百五` is 350
    return total + section + digit


def to_digits(text: str) -> str:
    """Write a number at the beginning of a text in digits: `一万五千元` is `15000 元`, `1.2 million` is `1.2*10^6`.

    In English words too: `one hundred and ten dollars` is `110 dollars`, `minus 3` is `-3`.
    """
    words = _SPELLED_NUMBER.match(text)
    if words is not None and words.end():
        in_full = f"{parse_english_number(words['words'])} " if words["words"] else ""
        return f"{'-' if words['sign'] else ''}{in_full}{text[words.end() :].strip()}".strip()
    mixed = _MIXED.match(text)
    if mixed is not None:
        low = int(mixed["low"] or 0) * {"千": 1000, "百": 100}.get(mixed["place"], 1)
        return f"{Fraction(mixed['high']) * 10**4 + low} {text[mixed.end() :]}".strip()
    scaled = _SCALED.match(text)
    if scaled is not None:
        zeros = len(str(SCALES[scaled["scale"].lower()])) - 1
        return f"{scaled['number']}*10^{zeros} {text[scaled.end() :].strip()}".strip()
    numeral = _NUMERAL.match(text)
    if numeral is None:
        return text
    value = numeral_value(numeral["number"])
    if value is None:
        return text
    sign = "-" if numeral["sign"] else ""
    return f"{sign}{value} {text[numeral.end() :].strip()}".strip()


def numeral_value(text: str) -> Fraction | None:
    """Return the value of a Chinese numeral, also of `三分之二` and `百分之十二`."""
    bottom, over, top = text.partition("分之")
    if not over:
        return parse_chinese_numeral(text)
    above, below = parse_chinese_numeral(top), Fraction(100) if bottom == "百" else parse_chinese_numeral(bottom)
    return above / below if above is not None and below else None


def find_chinese_counts(text: str) -> list[Fraction]:
    """Return the numerals before a measure word, as in `有五只猫`."""
    return [value for found in _COUNTED.findall(text) if (value := parse_chinese_numeral(found)) is not None]


def parse_english_number(words: str) -> Fraction:
    """Return the value of a number in English words that matches `ENGLISH_NUMERAL`."""
    whole, *part = re.split(rf"[ -](?:and a )?(?=(?:{'|'.join(_PARTS)})s?$)", words.lower(), maxsplit=1)
    value = find_english_numbers(whole)[-1]
    if not part:
        return value
    share = Fraction(1, _PARTS[part[0].removesuffix("s")])
    return value + share if " and a " in words.lower() else value * share


def find_english_numbers(text: str) -> list[Fraction]:
    """Return the numbers in English words, in order: "twenty-five", "two hundred and five", "two dozen"."""
    found: list[Fraction] = []
    thousands, below, before = 0, 0, ""
    for word in _WORDS.findall(text[-2000:].lower()):
        scaled = before in _SCALES or before in _LARGE
        if word == "and" and scaled:
            continue
        if word not in _SCALES and word not in _LARGE and word not in NUMBER_WORDS:
            before = word
            continue
        if word in NUMBER_WORDS:
            continues = scaled or (before in _TENS and 0 < NUMBER_WORDS[word] < 10)
        else:
            continues = scaled or before in NUMBER_WORDS
        if not continues or not found:
            thousands = below = 0
            found.append(Fraction(0))
        if word in NUMBER_WORDS:
            below += NUMBER_WORDS[word]
        elif word in _LARGE:
            thousands, below = min(thousands + _LARGE[word] * (below or 1), 10**18), 0
        else:
            below = (below % 100 or 1) * _SCALES[word]
        found[-1], before = Fraction(thousands + below), word
    return found
