"""Exact arithmetic on text, without evaluating it as a program."""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Literal

from pydantic import PrivateAttr

from rollmill.config.tools import ToolSection
from rollmill.python_source import parse_expression
from rollmill.rollout.tools.toolbox import ToolError

if TYPE_CHECKING:
    from contextlib import AsyncExitStack

    from rollmill.rollout.tools.pool import ToolPool
    from rollmill.rollout.tools.toolbox import Tool
    from rollmill.rollout.workflow import Rollout

MAX_EXPRESSION_CHARS = 1000
"""Maximum length of an expression."""
_MOST_BITS = 12_000  # of a numerator or denominator: about 3600 digits
_DIGITS = 12  # of inexact numbers
_SIGNS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "–": "-", "^": "^"})
_NUMBER = re.compile(r"[0-9.]+(?:[eE][+-]?[0-9]{1,3})?")
_BINARY: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction | int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


class CalculatorTool(ToolSection):
    """Exact arithmetic with rational numbers."""

    name: Literal["calculator"] = "calculator"
    _tool: Tool = PrivateAttr()

    def unused_keys(self) -> dict[str, str]:
        return {"time_limit_s": "not honoured by `calculator`, whose numbers are bounded; remove it"}

    def setup(self, pool: ToolPool) -> None:
        """Make the tool, which is fast and has no state, so it runs in the event loop."""
        from rollmill.rollout.tools.function_tool import FunctionTool

        made = FunctionTool(calculator)

        async def call(arguments: dict[str, Any]) -> str:
            return calculator(**made.checked(arguments))

        self._tool = made.tool(self.policy_name, self.description, call)

    def open(self, rollout: Rollout, stack: AsyncExitStack) -> Tool:
        return self._tool


def calculator(expression: str) -> str:
    """Compute an arithmetic expression exactly, for example (3 + 4.5) * 2 ** 10.

    Args:
        expression: numbers, + - * / // % **, parentheses, and abs, round, floor, ceil, sqrt, min, max, gcd, factorial.
    """
    if len(expression) > MAX_EXPRESSION_CHARS:
        raise ToolError(f"the expression is longer than {MAX_EXPRESSION_CHARS} characters")
    text = expression.translate(_SIGNS).replace("^", "**").strip()
    try:
        value = _value(parse_expression(text), text)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise ToolError("not an arithmetic expression") from None
    except ZeroDivisionError:
        raise ToolError("division by zero") from None
    except OverflowError:
        raise ToolError("a number is too large") from None
    return format_number(value)


def format_number(value: Fraction) -> str:
    """Format a whole number or a decimal fraction exactly; others as a fraction and 12 digits."""
    if value.denominator == 1:
        return str(value.numerator)
    twos, fives, rest = 0, 0, value.denominator
    while rest % 2 == 0:
        twos, rest = twos + 1, rest // 2
    while rest % 5 == 0:
        fives, rest = fives + 1, rest // 5
    places = max(twos, fives)
    if rest != 1 or places > 50:
        return f"{value.numerator}/{value.denominator} = {_rounded(value)}"
    digits = str(abs(value.numerator) * 10**places // value.denominator).rjust(places + 1, "0")
    return f"{'-' if value < 0 else ''}{digits[:-places]}.{digits[-places:]}"


def _rounded(value: Fraction) -> str:
    try:
        return f"{float(value):.{_DIGITS}g}"
    except OverflowError:
        return f"about 10**{math.log10(abs(value.numerator)) - math.log10(value.denominator):.6g}"


def _value(node: ast.expr, text: str) -> Fraction:
    match node:
        case ast.Constant(value=int() | float()) if not isinstance(node.value, bool):
            return _number(ast.get_source_segment(text, node) or "")
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return -_value(inner, text)
        case ast.UnaryOp(op=ast.UAdd(), operand=inner):
            return _value(inner, text)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(_value(left, text), _value(right, text))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _bounded(Fraction(_BINARY[type(op)](_value(left, text), _value(right, text))))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in _FUNCTIONS:
            return _applied(name, [_value(each, text) for each in arguments])
    raise ToolError(f"`{(ast.get_source_segment(text, node) or '')[:50]}` is not arithmetic")


def _number(text: str) -> Fraction:
    """Parse a number exactly as written: 0.1 is a tenth."""
    plain = text.replace("_", "")
    if _NUMBER.fullmatch(plain) is None:
        raise ToolError(f"`{text[:50]}` is not a decimal number")
    return Fraction(plain)


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        if base < 0:
            raise ToolError("a root of a negative number")
        return _sqrt(base) if exponent == Fraction(1, 2) else Fraction(float(base) ** float(exponent))
    size = max(base.numerator.bit_length(), base.denominator.bit_length())
    if base not in (0, 1, -1) and size * abs(exponent.numerator) > _MOST_BITS:
        raise ToolError("the power is too large")
    if abs(exponent.numerator) > _MOST_BITS:
        exponent = Fraction(exponent.numerator % 2 or 2)  # of 0, 1 and -1
    return Fraction(base**exponent)


def _applied(name: str, arguments: list[Fraction]) -> Fraction:
    try:
        return _bounded(Fraction(_FUNCTIONS[name](*arguments)))
    except TypeError:
        raise ToolError(f"`{name}` does not take these numbers") from None


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > _MOST_BITS:
        raise ToolError("a number is too large")
    return value


def _sqrt(value: Fraction) -> Fraction:
    if value < 0:
        raise ToolError("a root of a negative number")
    exact = Fraction(math.isqrt(value.numerator), math.isqrt(value.denominator))
    return exact if exact * exact == value else Fraction(math.sqrt(value))


def _whole(value: Fraction) -> int:
    if value.denominator != 1:
        raise TypeError(value)
    return value.numerator


def _factorial(value: Fraction) -> int:
    if not 0 <= _whole(value) <= 1000:
        raise ToolError("factorials of 0 to 1000 are known")
    return math.factorial(_whole(value))


def _round(value: Fraction, places: Fraction = Fraction(0)) -> Fraction:
    if abs(_whole(places)) > MAX_EXPRESSION_CHARS:
        raise TypeError(places)
    return round(value, _whole(places))


_FUNCTIONS: dict[str, Callable[..., Fraction | int]] = {
    "abs": abs,
    "ceil": math.ceil,
    "factorial": _factorial,
    "floor": math.floor,
    "gcd": lambda *values: math.gcd(*map(_whole, values)),
    "max": max,
    "min": min,
    "round": _round,
    "sqrt": _sqrt,
}
