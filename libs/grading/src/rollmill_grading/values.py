"""Finds the values in a text: numbers, formulas in delimiters, bare formulas such as y = -2x + 5, numerals.

Never raises. Linear in the length of the text except for brackets, of which few are examined.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from rollmill_grading.normalization import CJK
from rollmill_grading.numerals import CHINESE_DIGITS, CHINESE_NUMERAL, ENGLISH_NUMERAL, MEASURE_WORDS
from rollmill_grading.segmentation import Formula, SegmentedText

# Finds the end of the unit after a value: ` square feet per second`, `个苹果`.

_NO_UNITS = """
in on of at to for left remaining that which who when where while if because since as and or but so with by from
than then more fewer less greater larger smaller each total altogether overall is are was were be after before
during between the a an this these those today now they he she it we i you using such only instead out away per_ not
also respectively until every together combined again here there has have had does do did can could will would
should may might must get gets got cost costs need needs show shows make buy sell sold walked bought eat earn earns
take takes pay pays gives give weigh weighs yields remains remain satisfies satisfy holds hold matches follows
sitting standing visible exactly about approximately possible works apiece equals equal makes given
"""
_STOP = frozenset(_NO_UNITS.split())
"""Words after numbers that are not units."""
_UNIT = re.compile(
    rf"\s?(?:\\?%|°[CF]?|[€£¥])|[\s-]?(?P<word>[A-Za-zµΩ]+(?:[-/][A-Za-z]+)*\.?)(?:\^\{{?-?\d\}}?|[²³]|(?<=m)\d(?!\d))?"
    rf"|\s?[/每]?(?P<chinese>(?![是的和与或即且没不就才都也还在了吗呢吧共可能那而但所因只有到至又零])[{CJK}])"
)
_MOST = 5
_NAMED = re.compile(r"\$?[A-Za-z](?:_\w)?\s*=\s*[-+]?[\d.,/]+\$?")


def find_unit_end(text: str, start: int, end: int) -> int:
    """Return the end of the unit after a value, such as ` square feet per second` or `个苹果`.

    Of equations only those of a name and a number have one, as in `v = 18 km/h`.
    """
    run = text[start:end]
    is_relation = re.search(r"[A-Za-z]\)?\s*[=<>]|\\\{|[<>]", run) is not None and _NAMED.fullmatch(run) is None
    for _ in range(0 if is_relation else _MOST):
        found = _UNIT.match(text, end)
        if found is None or found.end() == end:
            break
        word = found["word"]
        if word is not None and (word.lower().rstrip(".") in _STOP or (len(word) == 1 and text[end] != " ")):
            break
        if word is not None and text[end : end + 1] == "-" and len(word) > 12:
            break
        end = found.end()
    return end


_FUNCTION = r"(?:arc)?(?:sin|cos|tan|cot|sec|csc)|sqrt|log|ln|exp|pi|infty|infinity|max|min|lim"
_COMMAND = re.compile(
    r"\\(?:begin\{(?P<env>\w+)\*?\}.{0,1500}?\\end\{(?P=env)\*?\}|[A-Za-z]+\*?|[{}%,;!|\\ ])"
    r"(?:\s?(?:\[[^\[\]{}]{0,20}\])?\{(?:[^{}]|\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\})*\}){0,2}",
    re.DOTALL,
)
_NUMBER = re.compile(
    r"\d{1,30}分之\d{1,30}|[$€£¥]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d{1,3}(?: \d{3})+(?![\d,]|\.\d)"
    r"|\d+)(?:\.\d+)?(?:[eE][+-]?\d{1,3}(?![\w]))?(?: \d{1,9}/\d{1,9}(?![\d/]))?|\.\d+"
)
_WORD = re.compile(
    rf"\d+(?:st|nd|rd|th)\b(?! root)|\d+-[A-Za-z]{{2,}}[A-Za-z-]*|[A-Za-z]-[A-Za-z]{{2,}}[A-Za-z-]*"
    rf"|(?!(?:{_FUNCTION})(?![a-z]))[A-Za-z]{{2,}}(?:[-'’][A-Za-z]+)*|第[{CHINESE_DIGITS}\d]+|[{CJK}]|['’\"“”]"
)
_FUNCTIONS = re.compile(rf"(?:{_FUNCTION})(?![a-z])")
_LETTER = re.compile(r"[A-Za-zα-ωΔΩθ]['′]{0,2}(?:_(?:\{[^{}]{1,20}\}|\w))?")
_OPERATOR = re.compile(r"<=|>=|!=|\*\*|->|[-+*/^=<>≤≥≠≈±·×÷∪∩∈:−–~|]")
_SIGN = re.compile(r"[°%‰!√π∞∅²³⁴⁵⁶⁷⁸⁹⁰¹½¼¾⅓⅔′″{}_①-⑳]")
_OPEN = "(["
_BRACKETS = re.compile(r"[(\[{)\]}]")
_CHINESE_VALUE = re.compile(
    rf"(?<![第{CHINESE_DIGITS}])(?:{CHINESE_NUMERAL})(?=[{MEASURE_WORDS}元角分米克吨升秒天年月日周岁个厘毫千公斤平立度\s,，。.;；!！)]|$)"
)
_LONG_CHINESE_VALUE = re.compile(rf"(?=[{CHINESE_DIGITS}]{{2}})(?![一-九]千[克米瓦]){_CHINESE_VALUE.pattern}")
"""A numeral of several characters: one beside digits is a value as well, unlike the 一 of 一本."""
_SPELLED_VALUE = re.compile(
    r"(?<!the )(?<!these )(?<!those )(?<!both )(?<!of )(?<!other )(?<!all )(?<!last )(?<!first )(?<!next )(?<!any )"
    rf"(?<!in )(?!one(?! (?:hundred|thousand|million|billion|half|third|fourth|quarter|fifth|sixth|eighth|tenth)|\W*$))"
    rf"{ENGLISH_NUMERAL}",
    re.IGNORECASE,
)
_LABELLED = re.compile(
    r"(?:\b(?:step|case|fig(?:ure)?|question|equation|eq|part|problem|section|theorem|example|method|type|option|choice"
    r"|chapter|page|line|row|item|no|number|solution|scenario|phase|stage|point|way)\.?|第|步骤|方法|情况|图|题)\s*[#(]?$",
    re.IGNORECASE,
)
_ENUMERATED = re.compile(r"(?:^|\n)[ \t>*]*\(?\d{1,2}[.)](?=\s)")
_STEP_NUMBER = re.compile(r"[#(]?\d[\d.,]*[a-z]?\)?")
"""A number as it follows `step`; `equation 3x + 2y = 12` and `point (2, 3)` are values."""
_MOST_OPERATORS = 4
"""Consecutive operators allowed in a formula: a row of thousands of dashes is none."""


@dataclass(frozen=True, slots=True)
class ValueSpan:
    """One value of a phrase: its position, and the end of the unit after it."""

    start: int
    end: int
    unit_end: int


def find_values(text: str) -> list[ValueSpan]:
    """Return all values of a text, in order."""
    passage = SegmentedText(text)
    found: list[ValueSpan] = []
    at = 0
    while at < len(text):
        run = _run(text, at, passage)
        if run is None:
            at = _next(text, at)
            continue
        start, end = run
        if _is_value(text, start, end, passage):
            unit_end = find_unit_end(text, start, end)
            found.append(ValueSpan(start, end, unit_end))
            end = unit_end  # the 2 of cm^2 is not a separate value
        at = max(end, at + 1)
    if not found:
        return [each for pattern in (_CHINESE_VALUE, _SPELLED_VALUE) for each in _numerals(text, pattern)]
    covered = [(each.start, each.unit_end) for each in found]
    mixed = [
        each
        for each in _numerals(text, _LONG_CHINESE_VALUE)
        if not any(start < each.unit_end and each.start < end for start, end in covered)
    ]
    return sorted([*found, *mixed], key=lambda each: each.start) if mixed else found


def _numerals(text: str, pattern: re.Pattern[str]) -> list[ValueSpan]:
    return [ValueSpan(*each.span(), find_unit_end(text, *each.span())) for each in pattern.finditer(text)]


def _next(text: str, at: int) -> int:
    """Return the next position at which a value may begin: after a word or one character."""
    word = _WORD.match(text, at)
    return word.end() if word is not None else at + 1


def _run(text: str, at: int, passage: SegmentedText) -> tuple[int, int] | None:
    """Return start and end of the longest formula that begins at a position."""
    end, joined, last_end = at, True, at
    brackets = operators = 0
    while True:
        gap = end < len(text) and text[end] == " " and end > at
        place = end + 1 if gap else end
        if place >= len(text):
            break
        kind, stop = _token(text, place, passage)
        if kind == "operator":
            if (
                gap
                and text[place] in "-–"
                and text[place + 1 : place + 2] == " "
                and not _starts(text, place + 2, passage)
            ):
                break
            if place == at and text[place] not in "-−+±~√|":
                break
            joined, end = True, stop
            operators += 1
            if operators > _MOST_OPERATORS:
                break
            continue
        if kind is None or (gap and not joined and kind not in ("command", "bracket")):
            break
        if gap and kind == "bracket" and not joined:
            break
        if kind == "letter" and place == at and not _is_variable(text, place, stop):
            break
        brackets += kind == "bracket"
        operators = 0
        end = last_end = stop
        joined = kind == "command" and text[stop - 1] != "}"
    return (at, last_end) if last_end > at and brackets < 40 else None


def _token(text: str, at: int, passage: SegmentedText) -> tuple[str | None, int]:
    formula = passage.formula_at(at)
    if formula is not None:
        return ("formula", formula.end) if at == formula.start else (None, at)
    if text[at] == "{":
        end = _closing(text, at)
        return ("bracket", end) if end is not None else (None, at)
    enumerated = _ENUMERATED.match(text, at)
    if enumerated is not None and (at == 0 or text[at - 1] == "\n"):
        return None, at
    if text.startswith("\\{", at) and (end := _closing(text, at + 1)) is not None:
        return "bracket", end
    for kind, pattern in (("command", _COMMAND), ("word", _WORD), ("number", _NUMBER), ("function", _FUNCTIONS)):
        found = pattern.match(text, at)
        if found is not None:
            return (None if kind == "word" else kind), found.end()
    if text[at] in _OPEN:
        end = _closing(text, at)
        return ("bracket", end) if end is not None else (None, at)
    for kind, pattern in (("letter", _LETTER), ("operator", _OPERATOR), ("sign", _SIGN)):
        found = pattern.match(text, at)
        if found is not None:
            return kind, found.end()
    return None, at


def _starts(text: str, at: int, passage: SegmentedText) -> bool:
    if at >= len(text):
        return False
    kind, end = _token(text, at, passage)
    return kind in ("number", "command", "formula", "bracket") or (kind == "letter" and _is_variable(text, at, end))


def _closing(text: str, at: int) -> int | None:
    """Return the position after the bracket that closes the one at `at`; None if the content is not a formula."""
    depth = 0
    for bracket in _BRACKETS.finditer(text, at, at + 400):
        depth += 1 if bracket[0] in "([{" else -1
        if depth > 40:
            return None
        if depth == 0:
            place = bracket.start()
            inside = text[at + 1 : place]
            plain = re.sub(r"\\[A-Za-z]+", "", inside)
            words = re.findall(r"[A-Za-z]{2,}", _FUNCTIONS.sub("", plain))
            prose = any(re.search("[aeiou]", word) and len(word) > 2 for word in words) or re.search(f"[{CJK}]", inside)
            return None if prose or not inside.strip() else place + 1
    return None


def _is_variable(text: str, at: int, end: int) -> bool:
    """True if a lone letter begins a formula: `x = 5`, but not `a cat`, `A is` or `I`."""
    behind = text[end : end + 12]
    return bool(
        re.match(r"\s?(?:[=<>≤≥≠≈∈]|\\(?:le|ge|in|neq|approx|to)(?![a-z]))|[-+*/^(_\d]|\s[+*/^-]\s", behind)
    ) and not (re.match(r"-[A-Za-z]{2}", text[end : end + 3]))


def _is_value(text: str, start: int, end: int, passage: SegmentedText) -> bool:
    """True if a run of characters is a value, not a mark, a word or a step number."""
    run = text[start:end]
    formula: Formula | None = passage.formula_at(start)
    if formula is not None and formula.end >= end:
        return formula.inner.strip("$ ") not in ("", "\\blacksquare", "\\square", "\\Box", "\\qed")
    if not re.search(r"[\dπ∞∅√\\①-⑳]|[A-Za-z]\s?[=<>≤≥≠^+*/(-]|[=+*/]\s?[A-Za-z]|infty|infinity|\(", run):
        return False
    if re.fullmatch(r"\([A-Za-z]\)|\(?\d{1,2}\)", run) and start and text[start - 1] not in " \n:：":
        return False
    return not (_STEP_NUMBER.fullmatch(run) and _LABELLED.search(text, max(0, start - 14), start))
