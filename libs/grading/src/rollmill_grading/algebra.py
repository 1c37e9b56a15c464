"""Compares formulas with sympy and math-verify, in a grader process.

Steps are counted rather than seconds, so that no verdict depends on the load of the machine. What sympy remembers of
earlier comparisons saves steps; so whatever is counted runs in a process that made none (`PristineProcess`).
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from inspect import CO_GENERATOR
from types import FrameType
from typing import Any

from latex2sympy2_extended import NormalizationConfig  # type: ignore[import-untyped]
from math_verify import LatexExtractionConfig, parse, verify
from sympy import (  # type: ignore[import-untyped]
    Basic,
    Derivative,
    Eq,
    Expr,
    Float,
    I,
    Integral,
    Limit,
    Poly,
    Product,
    Rational,
    Sum,
    Symbol,
    fraction,
    nan,
    solve,
    together,
    zoo,
)
from sympy.core.cache import clear_cache  # type: ignore[import-untyped]

from rollmill_grading.complexity import TOO_COSTLY
from rollmill_grading.pristine import PristineProcess

MAX_STEPS = 1_500_000
"""Calls of Python functions in one comparison, a second or two of an idle core."""

_RULES = NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="all")
"""Letters behind a number are variables, because units were taken off before."""
_WHOLE = [LatexExtractionConfig(boxed_match_priority=0, normalization_config=_RULES)]
"""Plain expressions would match a part of the text."""
_DIGITS = 40
_CLOSE = 1e-30
_NOTHING = 1e-80
"""Differences below this are rounding, also beside a zero."""
_UNEVALUATED = Integral, Sum, Product, Limit, Derivative
_IMAGINARY = Symbol("i", real=True)


class _TooMuchWork(BaseException):
    """A comparison took more than `MAX_STEPS`."""


class _Steps:
    """Counts calls of Python functions in the parts of a comparison whose work the size of the texts does not bound."""

    def __init__(self, most: int) -> None:
        self._left = most

    def _count(self, frame: FrameType, event: str, argument: Any) -> None:
        self._left -= 1
        if self._left < 0 and not frame.f_code.co_flags & CO_GENERATOR:  # what a closing generator raises is lost
            raise _TooMuchWork

    @contextmanager
    def counted(self) -> Iterator[None]:
        before = sys.gettrace()
        sys.settrace(self._count)
        try:
            yield
        finally:
            sys.settrace(before)
        if self._left < 0:
            raise _TooMuchWork


def load_algebra(setup: str) -> Callable[[Mapping[str, Any]], float | str]:
    """Return the function of a grader process: 1 if each text under `gold` equals another under `answer`, else 0.

    "too_costly" if that takes too many steps. The libraries are imported now, so that no answer pays for it.
    """
    logging.disable(logging.CRITICAL)
    pristine = PristineProcess(compare_formulas, warm_up)
    compare_quickly(["1"], ["1"])

    def compare(payload: Mapping[str, Any]) -> float | str:
        golds, answers = ([text] if isinstance(text := payload[key], str) else text for key in ("gold", "answer"))
        tolerance = payload.get("tolerance", 0.0)
        found = compare_quickly(golds, answers, tolerance)
        if found is not None:
            return found
        counted: float | str = pristine.call(golds, answers, tolerance)
        return counted

    return compare


def compare_quickly(golds: list[str], answers: list[str], tolerance: float = 0.0) -> float | None:
    """Return what `compare_formulas` would if values decide; None if that takes steps that are counted."""
    left, right = [_parsed(text) for text in golds], [_parsed(text) for text in answers]
    clear_cache()
    try:
        return _compare(left, right, tolerance, _Steps(0))
    except _TooMuchWork:
        return None


def compare_formulas(
    golds: list[str], answers: list[str], tolerance: float = 0.0, max_steps: int = MAX_STEPS
) -> float | str:
    """Return 1 if each reference equals another answer, else 0; `too_costly` if that takes more than `max_steps`.

    Text that cannot be parsed equals nothing. `tolerance` is the relative difference allowed between two numbers.
    """
    left, right = [_parsed(text) for text in golds], [_parsed(text) for text in answers]
    clear_cache()
    try:
        return _compare(left, right, tolerance, _Steps(max_steps))
    except _TooMuchWork:
        return TOO_COSTLY


def warm_up() -> None:
    """Let sympy import the modules that it imports on first use: steps of an import depend on where its code lies."""
    for gold, answer in ((r"\sqrt{x}=2", "x=4"), (r"\sin 2x<0", r"\sin 3x<0"), (r"\int_0^1 x^2 dx", r"\sin y=y")):
        compare_formulas([gold], [answer])


def _compare(left: list[list[Any]], right: list[list[Any]], tolerance: float, steps: _Steps) -> float:
    for golds in left:
        match = next((i for i, answers in enumerate(right) if _any_equal(golds, answers, tolerance, steps)), None)
        if match is None:
            return 0.0
        del right[match]
    return float(not right)


def _any_equal(golds: list[Any], answers: list[Any], tolerance: float, steps: _Steps) -> bool:
    return any(_equal(one, other, tolerance, steps) for one in golds for other in answers)


def _parsed(text: str) -> list[Any]:
    found = parse(f"$\\boxed{{{text}}}$", _WHOLE, fallback_mode="no_fallback", parsing_timeout=None)
    # The parser assumes that all names of a text with a lone `i` are complex, so that equal names of two texts differ.
    names = {part for each in found if isinstance(each, Basic) for part in each.atoms(Symbol)}
    alike = {name: Symbol(name.name, real=True) for name in names if name.is_real is not True}
    return [each.xreplace(alike) if alike and isinstance(each, Basic) else each for each in found]


def _equal(gold: Any, answer: Any, tolerance: float, steps: _Steps) -> bool:
    try:
        gold, answer = _with_imaginary_unit(gold, answer)
        if _is_evaluated(gold) and _is_evaluated(answer):
            same = _same_value(gold, answer, tolerance)
            if same is not None:
                return same
        if isinstance(gold, Eq) and isinstance(answer, Eq) and gold.free_symbols != answer.free_symbols:
            return False
        with steps.counted():
            if _is_undefined(gold) or _is_undefined(answer):
                return False
            same = _same_value(gold, answer, tolerance)
            if same is None:
                same = _same_equation(gold, answer)
            if same is not None:
                return same
            return bool(
                verify(
                    gold,
                    answer,
                    float_rounding=12,
                    allow_set_relation_comp=True,
                    timeout_seconds=None,
                    raise_on_error=True,
                )
            )
    except MemoryError:
        raise
    except Exception:
        return False


def _is_evaluated(expression: Any) -> bool:
    """True for a formula without integrals, sums, limits and the like, whose values are quick to find."""
    return isinstance(expression, Expr) and not expression.has(*_UNEVALUATED)


def _with_imaginary_unit(gold: Any, answer: Any) -> tuple[Any, Any]:
    """Read `i` as the imaginary unit if no other name occurs; beside others it may be an index or a current."""
    if not isinstance(gold, Expr) or not isinstance(answer, Expr):
        return gold, answer
    if gold.free_symbols | answer.free_symbols != {_IMAGINARY}:
        return gold, answer
    return gold.xreplace({_IMAGINARY: I}), answer.xreplace({_IMAGINARY: I})


def _is_undefined(expression: Any) -> bool:
    r"""True if a formula has no value, such as `\log_1 1` or `1/0`; sympy finds it equal to anything."""
    if not isinstance(expression, Basic):
        return False
    if isinstance(expression, Expr) and not expression.free_symbols:
        expression = expression.doit().evalf(10)
    return bool(expression.has(nan, zoo))


def _points(names: set[Any]) -> list[dict[Any, Any]]:
    """Four points without simple relations: with positive values, and with alternating signs."""
    ordered = sorted(names, key=str)
    if not ordered:
        return [{}]
    return [
        {
            name: Rational((7 + 6 * index + 2 * turn) * (-1) ** (turn * (index + turn // 2)), 5 + 4 * index)
            for index, name in enumerate(ordered)
        }
        for turn in range(4)
    ]


def _value(expression: Any, point: dict[Any, Any]) -> Any:
    """Value to 40 digits; None if there is none, or it is not finite."""
    found = expression.subs(point).evalf(_DIGITS)
    size = abs(found).evalf(_DIGITS)
    return found if size.is_Number and size.is_finite else None


def _exact(expression: Any) -> Any:
    return expression.xreplace({part: Rational(str(part)) for part in expression.atoms(Float)})


def _same_value(gold: Any, answer: Any, tolerance: float) -> bool | None:
    """True if two formulas agree to 30 digits, or within the tolerance, at every point with values.

    None if fewer than two points have them, so that symbolic algebra has to decide. math-verify rounds to an absolute
    number of digits, so any two tiny constants are equal to it, and its simplification may take hours.
    """
    if not isinstance(gold, Expr) or not isinstance(answer, Expr):
        return None
    points, seen = _points(gold.free_symbols | answer.free_symbols), 0
    gold, answer = _exact(gold), _exact(answer)
    for point in points:
        one, other = _value(gold, point), _value(answer, point)
        if one is None or other is None:
            continue
        if not _close(one, other, max(tolerance, _CLOSE)):
            return False
        seen += 1
    return True if seen >= min(2, len(points)) else None


def _close(one: Any, other: Any, tolerance: float) -> bool:
    difference = abs(one - other).evalf(_DIGITS)
    return bool(difference <= max(tolerance * abs(one).evalf(_DIGITS), _NOTHING))


def _same_equation(gold: Any, answer: Any) -> bool | None:
    """True if two equations of the same names have the same solutions, False if not; None if only math-verify may know.

    math-verify finds any two equations without a solution equal.
    """
    if not isinstance(gold, Eq) or not isinstance(answer, Eq):
        return None
    names = gold.free_symbols
    one, other = (fraction(together(_exact(each.lhs - each.rhs)))[0] for each in (gold, answer))
    values = [(_value(one, point), _value(other, point)) for point in _points(names)]
    if all(a and b for a, b in values):
        ratios = [a / b for a, b in values]
        if all(_close(ratios[0], ratio, _CLOSE) for ratio in ratios):
            return True
    if names and all(each.is_polynomial(*names) for each in (one, other)):
        polynomials = [Poly(each, *sorted(names, key=str)) for each in (one, other)]
        if all(each.domain.is_QQ or each.domain.is_ZZ for each in polynomials):
            parts = [each.sqf_part().set_domain("QQ").monic() for each in polynomials]
            return bool(parts[0] == parts[1])
    solved = [solve(each, names) for each in (gold, answer)]
    if not all(solved):
        return False
    if len(names) > 1:
        return None
    left, right = ([_value(solution, {}) for solution in solutions] for solutions in solved)
    if None in (*left, *right):
        return None
    return all(any(_close(a, b, _CLOSE) for b in right) for a in left) and all(
        any(_close(a, b, _CLOSE) for a in left) for b in right
    )
