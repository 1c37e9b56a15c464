"""Answers with several items: sets, tuples, intervals, matrices and lists."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Literal

from rollmill_grading.quantities import parse_quantity

CollectionKind = Literal["set", "ordered", "list", "matrix"]

RELATION = re.compile(r"[<>≤≥≠]|\\(?:leq?|geq?|l|g|neq?|lt|gt|leqslant|geqslant|in|notin|subset|subseteq)(?![A-Za-z])")

_MATRIX = re.compile(r"[(\[]?\\begin\{([pbB]?matrix|array)\}(.*)\\end\{\1\}[)\]]?", re.DOTALL)
_ROWS = re.compile(r"\[(?:\[[^\[\]]*\],?)+\]")
_EMPTY = re.compile(r"\\emptyset|\\varnothing|\\\{ ?\\\}")
_THOUSANDS = re.compile(r"(?<![\d,.])[1-9]\d{0,2}(?:,\d{3})+(?!\d|,\d)")
_TOKEN = re.compile(
    r"\\[\\{}]|\\(?:begin|end)(?![A-Za-z])|[()\[\]{}]|\\(?:cup|or|lor|vee|and)(?![A-Za-z])"
    r"|(?<![A-Za-z\\])(?:or|and)(?![A-Za-z])|[,;或]",
    re.IGNORECASE,
)
_CONDITION = re.compile(r"\\(?:mid|vert)(?![A-Za-z])|[|:]")
_MEMBERS = re.compile(
    r"\\\{ ?([A-Za-z]) ?(?:\\in ?\\mathbb ?\{?R\}? ?)?(?:\||\\mid(?![A-Za-z])|\\vert(?![A-Za-z])|:) ?(.*)\\\}"
)
VARIABLE = r"[A-Za-z](?:_\{?\w+\}?)?"
"""A variable, as a regular expression."""
_TARGET = re.compile(
    rf"(?:{VARIABLE}|\({VARIABLE}(?:, ?{VARIABLE})*\)) ?(?:=|\\in(?![A-Za-z])) ?(?=\\\{{|[(\[\]]|\\begin|\\emptyset)"
)
_NAMED = re.compile(rf"({VARIABLE}(?:\(\w\))?) ?= ?([^=]+)")
_REALS = re.compile(
    r"(?:[A-Za-z] ?\\in ?)?\\(?:mathbb|mathbf|mathrm|Bbb) ?\{? ?R ?\}?"
    r"(?: ?(?:\\(?:setminus|backslash|smallsetminus)(?![A-Za-z])|[-\\]) ?\\\{([^{}]*)\\\})?"
)
_PLUS_MINUS = re.compile(r"\\pm(?![A-Za-z])")


@dataclass(frozen=True, slots=True)
class AnswerCollection:
    """Several answers in one: their texts, in order.

    A set is in braces; `ordered` is a tuple or an interval (distinguished by `brackets`); a list has no brackets. The
    items of a matrix are row by row, and `brackets` holds its shape.
    """

    kind: CollectionKind
    items: tuple[str, ...]
    brackets: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """The variables of `x = 1, y = 2` if every item names a different one; else empty."""
        names = {found[0] for item in self.items if (found := split_assignment(item)) is not None}
        return tuple(sorted(names)) if len(names) == len(self.items) > 1 else ()

    @property
    def values(self) -> tuple[str, ...]:
        """The items without the variables they are assigned to, sorted by variable if `names` is not empty."""
        items = sorted(self.items) if self.names else self.items
        return tuple(item if (found := split_assignment(item)) is None else found[1] for item in items)


def split_assignment(text: str) -> tuple[str, str] | None:
    """Return the variable and the value of `x = 5`."""
    found = _NAMED.fullmatch(text)
    return None if found is None else (re.sub(r"[{}]", "", found[1]), found[2].strip())


def parse_collection(text: str) -> AnswerCollection | None:
    r"""Parse a normalised text as a collection, after any `x \in` or `(x, y) =`; None for anything else."""
    text = _TARGET.sub("", text, count=1) if _TARGET.match(text) else text
    return _matrix(text) or _bracketed(text) or _list(text)


def parse_as_list(text: str) -> AnswerCollection | None:
    """Parse `1,234` as two numbers, for a comparison with something that cannot be a single number."""
    return AnswerCollection("list", tuple(text.split(","))) if _THOUSANDS.fullmatch(text) else None


def split_list(text: str, *, thousands: bool = True) -> tuple[str, ...] | None:
    """Split a normalised text at commas outside brackets; None if its brackets do not match.

    With `thousands`, 1,000 is one number.
    """
    return _split(text, thousands=thousands)


def set_condition(text: str) -> str:
    r"""Return the condition of `\{x | x > 2\}`; other texts unchanged."""
    found = _MEMBERS.fullmatch(text)
    return text if found is None else found[2].strip()


def intervals_of_reals(text: str) -> str:
    r"""Write `\mathbb{R}` and `\mathbb{R} \setminus \{2\}` as intervals; other texts unchanged."""
    found = _REALS.fullmatch(text)
    if found is None:
        return text
    points = sorted(
        {point.strip(): _number(point.strip()) for point in (found[1] or "").split(",") if point.strip()}.items(),
        key=lambda each: each[1] or 0,
    )
    if any(value is None for _, value in points):
        return text
    ends = ["-\\infty", *(point for point, _ in points), "\\infty"]
    return " \\cup ".join(f"({one},{other})" for one, other in pairwise(ends))


def _number(text: str) -> Fraction | None:
    found = parse_quantity(text)
    return None if found is None or found.unit is not None or found.percent else found.value


def _matrix(text: str) -> AnswerCollection | None:
    found = _MATRIX.fullmatch(text)
    if found is not None:
        rows = [row.split("&") for row in re.split(r"\\\\(?:\[[^\[\]]*\])?", found[2]) if row.strip()]
    elif _ROWS.fullmatch(text.replace(" ", "")):
        rows = [row.split(",") for row in re.findall(r"\[([^\[\]]*)\]", text[1:-1])]
    else:
        return None
    shape = " ".join(str(len(row)) for row in rows)
    return AnswerCollection("matrix", tuple(cell.strip() for row in rows for cell in row), shape)


def _bracketed(text: str) -> AnswerCollection | None:
    if _EMPTY.fullmatch(text):
        return AnswerCollection("set", ())
    if text.startswith("\\{") and text.endswith("\\}"):
        inner = text[2:-2]
        items = _split(inner, thousands=", " in inner)
        return None if items is None or _CONDITION.search(inner) else AnswerCollection("set", items)
    if len(text) < 3 or text[0] + text[-1] not in ("()", "[]", "[)", "(]", "][", "{}"):
        return None
    items = _split(text[1:-1], thousands=", " in text)
    if items is None or (len(items) == 1 and text[0] != "["):
        return None
    brackets = {"][": "()", "{}": ""}.get(text[0] + text[-1], text[0] + text[-1])
    return AnswerCollection("ordered" if brackets else "set", items, brackets)


def _list(text: str) -> AnswerCollection | None:
    items = _split(text, thousands=True)
    if items is None or (RELATION.search(text) and re.search(r"[,;]|(?<![A-Za-z])and(?![A-Za-z])", text)):
        return None  # conditions that hold together are not a list of answers
    items = tuple(each for item in items for each in _both_signs(item))
    return AnswerCollection("list", items) if len(items) > 1 else None


def _both_signs(item: str) -> list[str]:
    if len(_PLUS_MINUS.findall(item)) != 1:
        return [item]
    return [re.sub(r"(^|= ?)\+", r"\1", _PLUS_MINUS.sub(sign, item)) for sign in ("+", "-")]


def _split(text: str, *, thousands: bool) -> tuple[str, ...] | None:
    """Split at commas, semicolons, "or", "and" and union signs outside brackets; None if brackets do not match.

    With `thousands`, a comma inside a number such as 1,000 does not separate.
    """
    kept = {at for found in _THOUSANDS.finditer(text) for at in range(*found.span())} if thousands else set()
    parts, depth, start = [], 0, 0
    for token in _TOKEN.finditer(text):
        mark = token[0]
        if mark in ("(", "[", "{", "\\{", "\\begin"):
            depth += 1
        elif mark in (")", "]", "}", "\\}", "\\end"):
            depth -= 1
            if depth < 0:
                return None
        elif depth == 0 and mark != "\\\\" and token.start() not in kept:
            parts.append(text[start : token.start()].strip())
            start = token.end()
    parts.append(text[start:].strip())
    return tuple(part for part in parts if part) if depth == 0 else None
