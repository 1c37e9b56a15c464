"""Equations as texts: statements side by side, and the sides of two equations that must be equal.

Symbolic algebra evaluates the left side of `2+2=5`, reads `x=5 \\quad y=2` as one chain, and finds any two equations
without a solution equal. So it gets pairs of sides, and whole equations only where the sides do not decide.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from rollmill_grading.collection import RELATION, VARIABLE
from rollmill_grading.quantities import strip_spaces

EQUALITY = re.compile(r"(=|≈|\\approx(?![A-Za-z])|\\simeq(?![A-Za-z]))")
"""A sign between two sides of an equation."""

_SEPARATOR = re.compile(
    r"\\\\(?:\[[^\[\]]*\])?|\\q?quad(?![A-Za-z])|\\[;,: ]|[\n;]|,(?!\d{3}(?!\d))|(?<![A-Za-z\\])and(?![A-Za-z])"
)
_STATEMENT = re.compile(
    rf"(?P<left>.*?\S.*?)(?:(?<![<>])=|{EQUALITY.pattern}|{RELATION.pattern})(?P<right>.*\S.*)", re.DOTALL
)
_NAME = re.compile(rf"{VARIABLE}(?:'+|\(\w\))?")
_OPEN = re.compile(
    r"(?<![\\A-Za-z])(?!(?:sqrt|pi|sin|cos|tan|cot|log|ln|exp)(?![A-Za-z])|e(?![A-Za-z])|i(?![A-Za-z]))[A-Za-z]"
    r"|\\(?:alpha|beta|gamma|delta|epsilon|eta|theta|kappa|lambda|mu|nu|rho|sigma|tau|varphi|phi|psi|omega)(?![A-Za-z])"
)
"""A name in a formula."""


_FALLING = {">": "<", "≥": "≤", r"\g": r"\l ", r"\ge": r"\le ", r"\geq": r"\le ", r"\gt": "<", r"\geqslant": r"\le "}


@dataclass(frozen=True, slots=True)
class SidePair:
    """Two texts that must be equal; only nearly if the answer has an approximation sign before its own."""

    gold: str
    answer: str
    approximate: bool = False


def split_statements(text: str) -> list[str]:
    r"""Split `x=1 \quad y=2` into its statements; the text as a whole if not every part is one."""
    if len(EQUALITY.findall(text)) + len(RELATION.findall(text)) < 2 or r"\begin" in text:
        return [text]
    parts, depth, start = [], 0, 0
    for token in re.finditer(rf"\\[{{}}]|[()\[\]{{}}]|{_SEPARATOR.pattern}", text):
        if token[0] in ("(", "[", "{", "\\{"):
            depth += 1
        elif token[0] in (")", "]", "}", "\\}"):
            depth -= 1
        elif depth == 0:
            parts.append(text[start : token.start()])
            start = token.end()
    statements = [part for part in [*parts, text[start:]] if part.strip()]
    return statements if all(_STATEMENT.fullmatch(part) for part in statements) else [text]


def join_statements(gold: str, answer: str) -> tuple[str, str]:
    """Write the statements of both texts as lists with commas, so that each of them counts.

    Lines of one answer may also be its working, so they only become a list if the reference is one, or if each line
    gives another name a value.
    """
    wanted, found = split_statements(gold), split_statements(answer)
    names = {_left_name(each) for each in found}
    if len(wanted) == 1 and (None in names or len(names) < len(found)):
        found = [answer]
    return (", ".join(wanted) if len(wanted) > 1 else gold), (", ".join(found) if len(found) > 1 else answer)


def _left_name(statement: str) -> str | None:
    left = re.sub(r"[\s$]", "", EQUALITY.split(statement)[0])
    return left if _NAME.fullmatch(left) else None


def split_sides(equation: str) -> list[tuple[str, str]]:
    """Return the sides of an equation or a chain, each with the sign before it; the first has `=`."""
    pieces = [piece.strip() for piece in EQUALITY.split(equation)]
    return list(zip(["=", *pieces[1::2]], pieces[::2], strict=True))


def rising(inequality: str) -> str:
    """Write `4 > x > 3` as `3 < x < 4`; other texts unchanged."""
    parts = RELATION.split(inequality)
    signs = RELATION.findall(inequality)
    if len(signs) < 2 or not all(sign in _FALLING for sign in signs):
        return inequality
    turned = [
        part
        for pair in zip(parts[:0:-1], reversed(signs), strict=True)
        for part in (pair[0].strip(), _FALLING[pair[1]])
    ]
    return "".join([*turned, parts[0].strip()])


def pair_sides(gold: str, answer: str) -> list[SidePair] | None:
    """Return the pairs of sides that are equal exactly if two equations say the same; None if algebra has to decide.

    Both texts have an equality sign and no other relation. A chain stands for its first and its last side, and each
    side of the answer counts.
    """
    golds, answers = split_sides(gold), split_sides(answer)
    if not all(side for _, side in (*golds, *answers)):
        return None
    first, value = golds[0][1], _value(golds)
    if len(golds) > 2 and any(re.fullmatch(VARIABLE, side) for _, side in golds[1:-1]):  # `a = b = 2`
        if len(golds) != len(answers):
            return None
        return [SidePair(one, other) for (_, one), (_, other) in zip(golds, answers, strict=True)]
    if _same(first, answers[0][1]):
        return [SidePair(value, side, sign != "=") for sign, side in answers[1:]]
    if not any(_OPEN.search(side) for _, side in golds):
        rest = answers[1:] if _NAME.fullmatch(answers[0][1]) else answers
        return [SidePair(value, side, sign != "=") for sign, side in rest]
    if len(answers) == 2:
        for fixed, other in ((answers[1][1], answers[0][1]), (answers[0][1], answers[1][1])):
            if _same(first, fixed):
                return [SidePair(value, other)]
            if len(golds) == 2 and _same(value, fixed) and _NAME.fullmatch(fixed):
                return [SidePair(first, other)]
    return None


def _value(sides: list[tuple[str, str]]) -> str:
    """Return the last side that is not only approximate."""
    exact = [side for sign, side in sides[1:] if sign == "="]
    if exact:
        return exact[-1]
    return sides[-1][1] if _OPEN.search(sides[0][1]) else sides[0][1]


def _same(one: str, other: str) -> bool:
    return re.sub(r"[{}]", "", strip_spaces(one)) == re.sub(r"[{}]", "", strip_spaces(other))
