"""Forms of mathematical answers and whether two of them say the same, by values at points; for labels of mutants.

An answer is a value, a list, a set, a tuple or interval, a union, an equation, an inequality or a measurement. Nothing
here uses rollmill or math-verify.
"""

from __future__ import annotations

import math
import random
import re
from dataclasses import dataclass
from itertools import permutations, product

from grading_bench.latex_values import UnreadableError, close, names_in, same_solutions, same_value, value_at

SIGNS = {"<": "<", ">": ">", "\\le": "<=", "\\leq": "<=", "\\leqslant": "<=", "\\lt": "<"}
SIGNS |= {"\\ge": ">=", "\\geq": ">=", "\\geqslant": ">=", "\\gt": ">", "\\neq": "!=", "\\ne": "!="}
_SIGN = re.compile(r"(\\(?:leqslant|geqslant|leq?|geq?|neq?|lt|gt)(?![A-Za-z])|[<>])")
UNITS = ("cm", "m", "km", "kg", "g", "s", "h", "min", "meters", "dollars", "years", "hours", "days")
_MEASURED = re.compile(rf"(?P<number>.*\S) ?\\(?:text|mathrm) ?\{{ ?(?P<unit>{'|'.join(UNITS)}) ?\}}")
_MOST_UNORDERED = 6


@dataclass(frozen=True, slots=True)
class Form:
    """An answer: its kind, its parts as texts, and what joins them (brackets, signs or a unit)."""

    kind: str
    parts: tuple[str, ...]
    marks: tuple[str, ...] = ()


def form_of(text: str) -> Form | None:
    """Return the form of an answer; None if it has none of these forms."""
    text = re.sub(r"\\(?:left|right)(?![A-Za-z])", "", text).strip().strip("$").strip()
    found = _form(re.sub(r"\\[,;:!]|\\q?quad(?![A-Za-z])", " ", text))
    if found is None:
        return None
    try:
        for part in found.parts:
            if "\\infty" not in part:
                names_in(part)
    except UnreadableError:
        return None
    return found


def _form(text: str) -> Form | None:
    if re.search(r"(?<![\\A-Za-z{])[A-Za-z]{4,}|\\mathrm \{ ", text):
        return None  # words
    union = [piece.strip() for piece in text.split("\\cup")]
    if len(union) > 1:
        pieces = [_interval(piece) for piece in union]
        if not all(pieces):
            return None
        return Form(
            "union",
            tuple(p for piece in pieces if piece for p in piece.parts),
            tuple(m for piece in pieces if piece for m in piece.marks),
        )
    if text.startswith("\\{") and text.endswith("\\}") and not re.search(r"[|:<>=]|\\mid|\\in|\\le|\\ge", text):
        items = _split(text[2:-2])
        return None if items is None else Form("set", items)
    if (interval := _interval(text)) is not None:
        return interval
    if (measured := _MEASURED.fullmatch(text)) is not None:
        return Form("measured", (measured["number"],), (measured["unit"],))
    items = _split(text)
    if items is None or not items:
        return None
    if len(items) > 1:
        return None if any(re.search(r"[=<>]|\\[lg]e", item) for item in items) else Form("list", items)
    signs = _SIGN.split(text)
    if len(signs) > 1:
        return (
            None if "=" in text else Form("inequality", tuple(signs[::2]), tuple(SIGNS[sign] for sign in signs[1::2]))
        )
    sides = text.split("=")
    return Form("value", (text,)) if len(sides) == 1 else Form("equation", tuple(sides)) if len(sides) == 2 else None


def _interval(text: str) -> Form | None:
    if len(text) < 5 or text[0] not in "([" or text[-1] not in ")]":
        return None
    items = _split(text[1:-1])
    if items is None or len(items) < 2:
        return None
    kind = "interval" if len(items) == 2 and (text[0] + text[-1] != "()" or "\\infty" in text) else "tuple"
    if kind == "tuple" and text[0] + text[-1] != "()":
        return None
    return Form(kind, items, (text[0], text[-1]))


def _split(text: str) -> tuple[str, ...] | None:
    parts, depth, start = [], 0, 0
    for at, sign in enumerate(text):
        depth += (sign in "([{") - (sign in ")]}")
        if depth < 0:
            return None
        thousands = re.match(r",\d{3}(?!\d)", text[at:]) and re.search(r"(?:^|\D)[1-9]\d{0,2}$", text[:at])
        if sign in ",;" and depth == 0 and not thousands:
            parts.append(text[start:at].strip())
            start = at + 1
    parts.append(text[start:].strip())
    return tuple(parts) if depth == 0 and all(parts) else None


def equivalent(gold: str, answer: str) -> bool | None:
    """True if two answers say the same, False if they do not; None if that is not known."""
    one, other = form_of(gold), form_of(answer)
    if one is None or other is None:
        return None
    if {one.kind, other.kind} <= {"value", "list", "set"}:
        return _unordered(one.parts, other.parts)
    if one.kind != other.kind:
        return None
    if one.kind == "equation":
        return same_solutions((one.parts[0], one.parts[1]), (other.parts[0], other.parts[1]))
    if one.kind == "inequality":
        return _same_truth(one, other)
    if one.kind == "measured" and one.marks != other.marks:
        return None
    if len(one.parts) != len(other.parts) or one.marks != other.marks:
        return False
    return _all([_same_end(a, b) for a, b in zip(one.parts, other.parts, strict=True)])


def _all(found: list[bool | None]) -> bool | None:
    return False if False in found else None if None in found else True


def _same_end(one: str, other: str) -> bool | None:
    infinite = [re.sub(r"[\s+{}]", "", part) for part in (one, other)]
    if "\\infty" in one or "\\infty" in other:
        return infinite[0] == infinite[1]
    return same_value(one, other)


def _unordered(one: tuple[str, ...], other: tuple[str, ...]) -> bool | None:
    if len(one) != len(other):
        return False
    if len(one) > _MOST_UNORDERED:
        return None
    found = [_all([same_value(a, b) for a, b in zip(one, order, strict=True)]) for order in permutations(other)]
    return True if True in found else None if None in found else False


def _same_truth(one: Form, other: Form) -> bool | None:
    """False if two inequalities differ at a point: random ones, and those where two sides are equal."""
    try:
        names = sorted({name for form in (one, other) for part in form.parts for name in names_in(part)})
        fixed = [value_at(part, {}).real for form in (one, other) for part in form.parts if not names_in(part)]
    except UnreadableError:
        return None
    rng = random.Random("".join(names))
    ends = [each + step for each in fixed for step in (0.0, -0.37, 0.37)]
    points = (
        [dict(zip(names, chosen, strict=True)) for chosen in product(ends, repeat=len(names))][:200]
        if len(names) < 3
        else []
    )
    points += [{name: rng.uniform(-9, 9) for name in names} for _ in range(200)]
    points += [dict.fromkeys(names, rng.uniform(-9, 9)) for _ in range(5)]
    seen = 0
    for point in points:
        truths = [_holds(form, point) for form in (one, other)]
        if None in truths:
            continue
        seen += 1
        if truths[0] != truths[1]:
            return False
    return None if seen < 50 else True


def _holds(form: Form, point: dict[str, float]) -> bool | None:
    try:
        values = [value_at(part, {name: complex(value) for name, value in point.items()}) for part in form.parts]
    except UnreadableError:
        return None
    if any(abs(value.imag) > 1e-12 for value in values):
        return None
    return all(_related(a.real, sign, b.real) for a, sign, b in zip(values, form.marks, values[1:], strict=False))


def _related(one: float, sign: str, other: float) -> bool:
    equal = close(one, other) or math.isclose(one, other, abs_tol=1e-12)
    if sign == "!=":
        return not equal
    if equal:
        return sign in ("<=", ">=")
    return one < other if sign[0] == "<" else one > other
