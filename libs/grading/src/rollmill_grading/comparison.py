"""Decides from their texts whether an answer equals a reference, and leaves the rest to symbolic algebra.

math-verify accepts a set, an interval or a false equation for a number, `1,2` for `(1,2)`, and drops units. So the
structure is compared here, and math-verify compares single expressions.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from rollmill_grading.collection import (
    RELATION,
    AnswerCollection,
    intervals_of_reals,
    parse_as_list,
    parse_collection,
    set_condition,
    split_assignment,
)
from rollmill_grading.equations import EQUALITY, join_statements, pair_sides, rising, split_sides
from rollmill_grading.quantities import (
    Quantity,
    Unit,
    normalize_answer,
    parse_quantity,
    quantities_equal,
    split_unit,
    strip_approximation,
    strip_spaces,
)

# Option letters: `(B)`, `B) 12` and, if the options are known, their texts.

_CHOICE = re.compile(
    r"(?:(?i:the |correct )*(?i:option|choice|answer) (?i:is )?)?"
    r"(?:\(([A-J])\)(?!\S*[+*/^])|([A-J])[.):](?=\s|$)|([A-J])$)(.*)",
    re.DOTALL,
)


_SEPARATOR = re.compile(r"[\s.,:;=]*(?:-(?=\s))?")
"""Separator between a letter and its option; in `(B) -2` the sign belongs to the number."""


def option_texts(options: Mapping[Any, Any] | Sequence[Any] | None) -> dict[str, str]:
    """Return options by letter. A list is in the order of the letters; None has none."""
    if isinstance(options, Mapping):
        return {str(letter).strip("()").upper(): str(option) for letter, option in options.items()}
    if isinstance(options, list | tuple):
        return {chr(ord("A") + index): str(option) for index, option in enumerate(options)}
    return {}


def parse_option_letter(gold: str) -> str | None:
    """Return the letter if a normalised reference is only an option letter, as in `B` or `(B)`."""
    return gold.strip("()") if re.fullmatch(r"[A-J]|\([A-J]\)", gold) else None


def split_option(answer: str) -> tuple[str, str] | None:
    """Split a normalised answer into its leading option letter and the rest."""
    if re.fullmatch(r"\(?[a-j]\)?", answer):
        answer = answer.upper()
    found = _CHOICE.fullmatch(answer)
    if found is None:
        return None
    return found[1] or found[2] or found[3], _SEPARATOR.sub("", found[4], count=1).strip(" .,:;=")


_APPROXIMATE = Fraction(1, 100)
"""Relative difference allowed after an approximation sign."""

_ALTERNATIVE = re.compile(r" ?,? ?(?:(?<![A-Za-z])or(?![A-Za-z])|或者?) ?")
_CLOCK = re.compile(r"\d{1,2}:[0-5]\d(?::[0-5]\d)?")
_TIMES_100 = re.compile(r"(?:\\times|\\cdot|\*|x) ?100(?![\d.%]).*=")
CALL_EQUATION = re.compile(r"^[A-Z] ?\([^()]{0,40}=[^()]{1,40}\) ?=")
"""The name of a value with an equation in it, as in `P(X = 2) = 16/35`."""
_LETTER = re.compile(r"(?<![\\A-Za-z])[A-Za-z]|\\(?:alpha|beta|gamma|delta|theta|phi|lambda|mu|omega|angle|triangle)")
_VARIABLE = re.compile(r"(?<![\\A-Za-z])(?!e\^|i(?![A-Za-z])|sqrt|pi)[A-Za-z]")
_SEVERAL = re.compile(
    r"\\(?:cup|cap|to|pm|mp|setminus)(?![A-Za-z])|;|(?<![A-Za-z])(?:or|and)(?![A-Za-z])", re.IGNORECASE
)
_UNIT_IN_WORDS = re.compile(r" (?:[cdkm]m|[km]g|ft|(?:[A-Za-z]{4,}[ /]?)+)(?: ?\^ ?\{?[23]\}?)?")
"""A unit that is not a product of variables."""
_COORDINATE = re.compile(r"(?<![\\A-Za-z_])[xyz](?![A-WYZa-w_(])")
TRIGONOMETRY = re.compile(r"\\?(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])")
_RATIO = re.compile(r"(\d+(?:\.\d+)?(?: ?: ?\d+(?:\.\d+)?)+)(?: ?([ap])\.?m\.?)?", re.IGNORECASE)
_BASE = re.compile(r"([0-9A-F]+)_ ?\{?(\d+)\}?")


@dataclass(frozen=True, slots=True)
class SymbolicEquality:
    """Expressions that symbolic algebra has to pair: each of `golds` equals a different one of `answers`.

    `slack` is the relative difference allowed between numbers here, if it is larger than that of the comparison.
    """

    golds: tuple[str, ...]
    answers: tuple[str, ...]
    slack: Fraction = Fraction(0)


@dataclass(frozen=True, slots=True)
class AnswerMatchOptions:
    """Rules of the comparison.

    `slack` is the relative difference allowed between plain numbers; `units_required` refuses a missing unit.
    """

    slack: Fraction = Fraction(0)
    units_required: bool = False


EXACT = AnswerMatchOptions()
FLOAT_ROUNDING = Fraction(1, 10**9)
"""Relative difference allowed if the reference is a Python float."""


def compare_texts(gold: str, answer: str, rules: AnswerMatchOptions = EXACT) -> bool | list[SymbolicEquality]:
    """Return True or False if the texts decide, else the equalities that must all hold.

    Both texts are normalised here. Never raises.
    """
    gold, answer = (strip_approximation(normalize_answer(text)) for text in join_statements(gold, answer))
    if not answer:
        return not gold
    if strip_spaces(gold) == strip_spaces(answer):
        return True
    letter, choice = parse_option_letter(gold), split_option(answer)
    if letter is not None and choice is not None:
        return letter == choice[0]
    if choice is not None and not choice[1] and choice[0] == parse_option_letter(gold.upper()):
        return True  # `B` for `b`
    if any(parse_option_letter(one) and parse_quantity(other) for one, other in ((gold, answer), (answer, gold))):
        return False  # a letter is not a number
    if letter is None and choice is not None and choice[1]:
        answer = choice[1]
    if is_plain_words(gold):
        return strip_spaces(gold).casefold() == strip_spaces(answer).casefold()
    for written in (_RATIO, _BASE):
        if (found := written.fullmatch(gold)) is not None:
            return _same_notation(found, answer, written)
    return _settle(gold, answer, rules)


def _settle(gold: str, answer: str, rules: AnswerMatchOptions) -> bool | list[SymbolicEquality]:
    one, other = parse_quantity(gold), parse_quantity(answer)
    if one is not None and other is not None:
        return quantities_equal(one, other, slack=rules.slack, units_required=rules.units_required)
    is_named = split_assignment(gold)
    if is_named is not None and not _VARIABLE.search(is_named[1]):
        also = split_assignment(answer)
        if also is None and EQUALITY.search(answer) and _VARIABLE.search(answer) and parse_collection(answer) is None:
            return _settle_equations(gold, answer, rules)  # `x + 1 = 5` is not `x = 5`
        return (also is None or also[0] == is_named[0]) and compare_texts(is_named[1], answer, rules)
    gold, answer = (rising(intervals_of_reals(set_condition(text))) for text in (gold, answer))
    golds, answers = parse_collection(gold), parse_collection(answer)
    if golds is not None and answers is None:
        answers = parse_as_list(answer)
    if golds is not None and answers is not None:
        return _settle_collections(golds, answers, rules)
    if EQUALITY.search(gold) or RELATION.search(gold):
        if answers is None and not any(each.search(answer) for each in (_VARIABLE, EQUALITY, RELATION)):
            return False  # a constant is not an equation
        if EQUALITY.search(answer) and not RELATION.search(gold + answer):
            return _settle_equations(gold, answer, rules)
        return other is None and [SymbolicEquality((gold,), (answer,))]
    if golds is not None:
        return (
            golds.kind in ("ordered", "list")
            and bool(RELATION.search(answer))
            and [SymbolicEquality((gold,), (answer,))]
        )
    same = _ALTERNATIVE.split(answer)
    if len(same) > 1 and all(compare_texts(gold, each, rules) is True for each in same):
        return True  # `1/2 or 0.5`
    if answers is not None or RELATION.search(answer) or _SEVERAL.search(answer):
        return bool(_SEVERAL.search(gold)) and [SymbolicEquality((gold,), (answer,))]
    return _settle_sides(gold, answer, rules)


def _settle_equations(gold: str, answer: str, rules: AnswerMatchOptions) -> bool | list[SymbolicEquality]:
    """Compare two equations side by side where that decides; else leave the whole equations to symbolic algebra."""
    pairs = pair_sides(gold, answer)
    if pairs is None:
        golds, answers = split_sides(gold), split_sides(answer)
        return len(answers) == 2 and [SymbolicEquality((f"{golds[0][1]}={golds[-1][1]}",), (answer,))]
    equalities = []
    for pair in pairs:
        slack = max(rules.slack, _APPROXIMATE) if pair.approximate else rules.slack
        found = compare_texts(pair.gold, pair.answer, replace(rules, slack=slack))
        if found is False:
            return False
        equalities += [replace(each, slack=slack) for each in found] if isinstance(found, list) else []
    return equalities or True


def _settle_collections(
    golds: AnswerCollection, answers: AnswerCollection, rules: AnswerMatchOptions
) -> bool | list[SymbolicEquality]:
    unordered = "list", "set"
    if golds.kind == "list" and golds.names and answers.names:
        return golds.names == answers.names and _settle_in_order(golds.values, answers.values, rules)
    if golds.kind in unordered and answers.kind in unordered:
        return _settle_unordered(golds, answers, rules)
    if golds.kind == answers.kind:
        return golds.brackets == answers.brackets and _settle_in_order(golds.items, answers.items, rules)
    if {golds.kind, answers.kind} != {"list", "ordered"} or (golds.kind == "ordered" and not answers.names):
        return False
    tupled = golds if golds.kind == "ordered" else answers
    return tupled.brackets == "()" and _settle_in_order(golds.values, answers.values, rules)


def _settle_in_order(
    golds: tuple[str, ...], answers: tuple[str, ...], rules: AnswerMatchOptions
) -> bool | list[SymbolicEquality]:
    if len(golds) != len(answers):
        return False
    equalities = []
    for gold, answer in zip(golds, answers, strict=True):
        found = compare_texts(gold, answer, rules)
        if found is False:
            return False
        equalities += found if isinstance(found, list) else []
    return equalities or True


def _settle_unordered(
    golds: AnswerCollection, answers: AnswerCollection, rules: AnswerMatchOptions
) -> bool | list[SymbolicEquality]:
    """Pair the items; a set holds each text once, a list may repeat it."""
    left, right = list(golds.values), list(answers.values)
    if "set" in (golds.kind, answers.kind):
        left, right = list(dict.fromkeys(map(strip_spaces, left))), list(dict.fromkeys(map(strip_spaces, right)))
    if len(left) != len(right):
        return False
    open_left, may_be_equal = [], True
    for gold in left:
        found = {answer: compare_texts(gold, answer, rules) for answer in right}
        equal = next((answer for answer, same in found.items() if same is True), None)
        if equal is not None:
            right.remove(equal)
        else:
            open_left.append(gold)
            may_be_equal = may_be_equal and any(isinstance(same, list) for same in found.values())
    if not right:
        return True
    return may_be_equal and [SymbolicEquality(tuple(open_left), tuple(right))]


def _settle_sides(gold: str, answer: str, rules: AnswerMatchOptions) -> bool | list[SymbolicEquality]:
    """Compare every side of an equation with the reference, except a name on its left."""
    number = parse_quantity(gold)
    if answer.count("%") > 1 and answer.endswith("%"):  # `35% - 15% = 20%`
        answer = answer.replace("%", "")
    if answer.endswith("%") and gold.endswith("%") and _TIMES_100.search(answer):  # `20/80 * 100 = 25%`
        gold, answer = gold.rstrip("%"), answer.replace("%", "")
        number = parse_quantity(gold)
    sides = split_sides(CALL_EQUATION.sub("", answer, count=1))
    if number is not None and len(sides) == 2 and is_equation_side(sides[0][1]):
        return False
    while len(sides) > 1 and _LETTER.search(sides[0][1]):
        sides = [("=", sides[1][1]), *sides[2:]]
        if _VARIABLE.search(gold):
            break
    equalities = []
    for sign, side in sides:
        found = parse_quantity(side)
        if not side or (number is not None and parse_collection(side) is not None):
            return False
        if number is not None and found is not None:
            slack = rules.slack if sign == "=" else max(rules.slack, _APPROXIMATE)
            if not quantities_equal(number, found, slack=slack, units_required=rules.units_required):
                return False
        else:
            equality = _in_one_unit(gold, side, rules)
            if equality is None:
                return False
            equalities.append(equality if sign == "=" else replace(equality, slack=max(rules.slack, _APPROXIMATE)))
    return equalities or True


def is_equation_side(side: str) -> bool:
    """True if a left side is that of a line or curve, as in `3x + 2y = 12`; `x + y` and `xy` may name a value."""
    if len({*_COORDINATE.findall(side)}) < 2 or not re.search(r"[+-]", side):
        return False
    return re.search(r"\d ?\(?[xyz]|\^", side) is not None


def _in_one_unit(gold: str, answer: str, rules: AnswerMatchOptions) -> SymbolicEquality | None:
    r"""Return the equality without units, e.g. `2\sqrt{3}` m and `200\sqrt{3}` cm; None if the units differ in kind."""
    one, other = _measured(gold), _measured(answer)
    if one[1] is None or other[1] is None:
        return None if rules.units_required and one[1] is not None else SymbolicEquality((one[0],), (other[0],))
    if one[1].measure != other[1].measure:
        return None
    ratio = other[1].size / one[1].size
    scaled = other[0] if ratio == 1 else rf"\frac{{{ratio.numerator}}}{{{ratio.denominator}}} \cdot ({other[0]})"
    return SymbolicEquality((one[0],), (scaled,))


def _measured(text: str) -> tuple[str, Unit | None]:
    """Split a formula into number and unit; one with variables stays whole, unless the unit is more than a letter."""
    if TRIGONOMETRY.search(text):
        return text, None
    number, unit = split_unit(text)
    if unit is None and (words := re.fullmatch(r"(.*(?:\\pi|[)}!])) (\S.*)", text)) is not None:
        number, unit = words[1], split_unit(f"1 {words[2]}")[1]
    is_unit = not _VARIABLE.search(number) and text[len(number) :].strip() not in ("h", "l")  # as in `2\\pi h`
    is_unit = is_unit or _UNIT_IN_WORDS.fullmatch(text[len(number) :]) is not None
    return (number, unit) if isinstance(unit, Unit) and is_unit else (text, None)


def _same_notation(gold: re.Match[str], answer: str, written: re.Pattern[str]) -> bool:
    """Compare numbers with a base and times of day: the same digits. "am" and the base may be missing on one side.

    Ratios are equal if one is a multiple of the other, unless the reference looks like a time of day. A ratio of two is
    also a fraction.
    """
    if written is _RATIO and not _CLOCK.fullmatch(gold[1].replace(" ", "")):
        answer = re.sub(r"(?<=\d) to (?=\d)", ":", answer)
    found = written.fullmatch(answer)
    if found is not None:
        one, other = gold[1].replace(" ", ""), found[1].replace(" ", "")
        is_ratio = written is _RATIO and not (gold[2] or found[2] or _CLOCK.fullmatch(one))
        same = _proportional(one, other) if is_ratio else one == other
        return same and (gold[2] is None or found[2] is None or gold[2].lower() == found[2].lower())
    if written is _BASE:
        return answer == gold[1]
    top, *rest = gold[1].replace(" ", "").split(":")
    value = parse_quantity(answer)
    is_fraction = len(rest) == 1 and not gold[2] and Fraction(rest[0]) != 0
    return is_fraction and value is not None and value == Quantity(Fraction(top) / Fraction(rest[0]))


def _proportional(one: str, other: str) -> bool:
    left, right = ([Fraction(part) for part in text.split(":")] for text in (one, other))
    if len(left) != len(right) or not (any(left) and any(right)):
        return False
    return all(a * sum(right) == b * sum(left) for a, b in zip(left, right, strict=True))


def is_plain_words(text: str) -> bool:
    """True if a text is plain language, not a product of variables: letters with a vowel, no digits, no formula."""
    if re.fullmatch(r"[^\W\d_]{2,}(?:[\s'-]+[^\W\d_]+)*", text) is None:
        return False
    return not text.isascii() or text.lower() == "no" or re.search(r"(?i)(?=\w*[aeiou])\w{3}", text) is not None
