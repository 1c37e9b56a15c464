"""Values of LaTeX formulas at points, for the labels of mutated answers. Independent of rollmill and math-verify.

A formula is evaluated in complex numbers with a value for each name. What this cannot read has no label.
"""

from __future__ import annotations

import cmath
import math
import random
import re
from collections.abc import Callable, Mapping

GREEK = (
    r"\\(?:alpha|beta|gamma|delta|epsilon|zeta|eta|theta|kappa|lambda|mu|nu|rho|sigma|tau|phi|varphi|psi|chi|omega"
    r"|Delta|Gamma|Lambda|Omega|Phi|Psi|Sigma|Theta|ell|hbar)(?![A-Za-z])"
)
_TOKEN = re.compile(
    r"\s*(?:(?P<number>\d+(?:\.\d*)?[eE][+-]?\d+|\d+(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+\.?\d*|\.\d+)"
    rf"|(?P<greek>{GREEK})|(?P<command>\\[A-Za-z]+|\\[%])|(?P<sign>[-+*/^_!(){{}}\[\]|'%°])|(?P<letter>[A-Za-z]))"
)
_CLEAN = (
    (r"\\(?:left|right|displaystyle|limits|bigl?|bigr?|Bigl?|Bigr?)(?![A-Za-z])", " "),
    (r"\\(?:mathrm|mathbf|mathit|text|operatorname|rm)\s*\{\s*([A-Za-z]+)\s*\}", r" \1 "),
    (r"\\[,;:! ]|\\q?quad(?![A-Za-z])|~|\$", " "),
    (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
    (r"\^\s*\{?\s*\\circ\s*\}?", "°"),
    (r"(?<![\\A-Za-z])(sqrt|pi|sin|cos|tan|log|ln|exp)(?![A-Za-z])", r"\\\1 "),
    (r"×|⋅|·", r"\\cdot "),
    (r"π", r"\\pi "),
    (r"−", "-"),
)
_FUNCTIONS: dict[str, Callable[[complex], complex]] = {
    "sin": cmath.sin,
    "cos": cmath.cos,
    "tan": cmath.tan,
    "cot": lambda x: 1 / cmath.tan(x),
    "sec": lambda x: 1 / cmath.cos(x),
    "csc": lambda x: 1 / cmath.sin(x),
    "ln": cmath.log,
    "lg": cmath.log10,
    "exp": cmath.exp,
    "arcsin": cmath.asin,
    "arccos": cmath.acos,
    "arctan": cmath.atan,
    "sinh": cmath.sinh,
    "cosh": cmath.cosh,
    "tanh": cmath.tanh,
}
_STOPS = frozenset({")", "]", "}", "|", "+", "-", "/"})


class UnreadableError(ValueError):
    """A formula that the evaluator does not know, or that has no value at a point."""


class _Reader:
    """Reads one formula and evaluates it at once."""

    def __init__(self, text: str, values: Mapping[str, complex], names: set[str]) -> None:
        for pattern, to in _CLEAN:
            text = re.sub(pattern, to, text)
        self._tokens: list[str] = []
        at, text = 0, text.strip()
        while at < len(text):
            found = _TOKEN.match(text, at)
            if found is None:
                raise UnreadableError(f"{text[at:]!r:.40} is no part of a formula")
            self._tokens.append(found[0].strip())
            at = found.end()
        self._at, self._values, self._names = 0, values, names

    def whole(self) -> complex:
        value = self._sum()
        if self._at < len(self._tokens):
            raise UnreadableError(f"{self._tokens[self._at]!r} is left over")
        return value

    def _peek(self) -> str:
        return self._tokens[self._at] if self._at < len(self._tokens) else ""

    def _take(self, wanted: str | None = None) -> str:
        token = self._peek()
        if not token or (wanted is not None and token != wanted):
            raise UnreadableError(f"{token!r} instead of {wanted!r}")
        self._at += 1
        return token

    def _sum(self) -> complex:
        value = 0j
        sign = 1.0
        while self._peek() in ("+", "-"):
            sign *= -1 if self._take() == "-" else 1
        value = sign * self._product()
        while self._peek() in ("+", "-"):
            sign = -1.0 if self._take() == "-" else 1.0
            while self._peek() in ("+", "-"):
                sign *= -1 if self._take() == "-" else 1
            value += sign * self._product()
        return value

    def _product(self) -> complex:
        value = self._power(mixed=True)
        while (token := self._peek()) not in _STOPS | {""} or token == "/":
            if token in ("*", "\\cdot", "\\times"):
                self._take()
                value *= self._signed()
            elif token in ("/", "\\div"):
                self._take()
                value /= self._signed()
            elif token[0] in "0123456789.":
                raise UnreadableError("a number behind a factor")
            else:
                value *= self._power()
        return value

    def _signed(self) -> complex:
        return -self._power() if self._peek() == "-" and self._take() else self._power()

    def _power(self, *, mixed: bool = False) -> complex:
        number = self._peek()
        value = self._atom()
        if mixed and number.isdigit() and self._peek() == "\\frac":
            raise UnreadableError("a mixed number or a product")
        while self._peek() in ("^", "!", "°", "%", "\\%"):
            mark = self._take()
            if mark == "^":
                value = complex(value) ** self._argument()
            elif mark == "!":
                if value.imag or value.real < 0 or value.real > 150:
                    raise UnreadableError("a factorial without a value")
                value = complex(math.gamma(value.real + 1))
            else:
                value *= math.pi / 180 if mark == "°" else 0.01
        return value

    def _argument(self) -> complex:
        """A group, or one token."""
        if self._peek() == "{":
            return self._group("{", "}")
        token = self._peek()
        if token.isdigit() and len(token) > 1:  # `\frac12`, `x^23`: one digit counts
            self._tokens[self._at : self._at + 1] = list(token)
        return -self._argument() if self._peek() == "-" and self._take() else self._atom()

    def _group(self, opening: str, closing: str) -> complex:
        self._take(opening)
        value = self._sum()
        self._take(closing)
        return value

    def _atom(self) -> complex:
        token = self._take()
        if token[0] in "0123456789.":
            return complex(float(token.replace(",", "")))
        if token in "([{":
            self._at -= 1
            return self._group(token, {"(": ")", "[": "]", "{": "}"}[token])
        if token == "|":
            value = complex(abs(self._sum()))
            self._take("|")
            return value
        if token == "\\frac":
            return self._argument() / self._argument()
        if token == "\\sqrt":
            index = self._group("[", "]") if self._peek() == "[" else 2
            return self._argument() ** (1 / index)
        if token == "\\pi":
            return complex(math.pi)
        if token in ("\\binom", "\\dbinom"):
            top, bottom = self._argument(), self._argument()
            return complex(
                math.gamma(top.real + 1) / math.gamma(bottom.real + 1) / math.gamma(top.real - bottom.real + 1)
            )
        if token == "\\log":
            base = complex(10)
            if self._peek() == "_":
                self._take()
                base = self._argument()
            return cmath.log(self._operand()) / cmath.log(base)
        if token[1:] in _FUNCTIONS and token[0] == "\\":
            power: complex = 1
            if self._peek() == "^":
                self._take()
                power = self._argument()
            if power == -1:
                raise UnreadableError("an inverse function")
            return _FUNCTIONS[token[1:]](self._operand()) ** power
        if token.isalpha() or re.fullmatch(GREEK, token):
            return self._name(token)
        raise UnreadableError(f"{token!r} has no value")

    def _operand(self) -> complex:
        """The operand of a function: a group, or factors up to the next sign or function."""
        if self._peek() in ("(", "{"):
            return self._power()
        value = self._power()
        while self._peek() and (self._peek().isalpha() or re.fullmatch(GREEK, self._peek()) or self._peek() == "\\pi"):
            value *= self._power()
        return value

    def _name(self, name: str) -> complex:
        if name == "e":
            return complex(math.e)
        if name == "i":
            return 1j
        while self._peek() in ("_", "'"):
            name += self._take()
            if name.endswith("_"):
                if self._peek() == "{":
                    end = self._tokens.index("}", self._at) if "}" in self._tokens[self._at :] else len(self._tokens)
                    name += "".join(self._tokens[self._at + 1 : end])
                    self._at = end + 1
                else:
                    name += self._take()
        if name in "fgh" and self._peek() == "(":
            raise UnreadableError("a function")
        self._names.add(name)
        return self._values.get(name, 1.5 + 0j)


def value_at(text: str, values: Mapping[str, complex]) -> complex:
    """Value of a formula; names without a value are 1.5. Raises UnreadableError."""
    return _read(text, values, set())


def names_in(text: str) -> set[str]:
    """Names of a formula, except e, i and π. Raises UnreadableError."""
    names: set[str] = set()
    _read(text, {}, names)
    return names


def _read(text: str, values: Mapping[str, complex], names: set[str]) -> complex:
    try:
        value = _Reader(text, values, names).whole()
    except (ArithmeticError, ValueError, RecursionError) as error:
        raise UnreadableError(str(error)) from error
    if not cmath.isfinite(value):
        raise UnreadableError("no finite value")
    return value


def points(names: set[str], count: int = 5) -> list[dict[str, complex]]:
    """Random points, positive and without simple relations; the same for the same names."""
    rng = random.Random("".join(sorted(names)))
    return [{name: complex(rng.uniform(0.31, 2.9)) for name in sorted(names)} for _ in range(count)]


def close(one: complex, other: complex, tolerance: float = 1e-9) -> bool:
    """True if two values differ by rounding only."""
    return abs(one - other) <= tolerance * max(abs(one), abs(other), 1e-30)


def same_value(one: str, other: str) -> bool | None:
    """True if two formulas agree at all points, False if they differ at all that have values; None if neither holds."""
    try:
        names = names_in(one) | names_in(other)
        found = [close(value_at(one, point), value_at(other, point)) for point in points(names)]
    except UnreadableError:
        return None
    return True if all(found) else False if not any(found) else None


def same_solutions(one: tuple[str, str], other: tuple[str, str]) -> bool | None:
    """True if two equations, given by their sides, are multiples of each other; False if a solution fails the other.

    Solutions are sought with Newton's method for one name, from complex starts, at random values of the others. None if
    neither is found.
    """

    def difference(sides: tuple[str, str], values: Mapping[str, complex]) -> complex:
        return value_at(sides[0], values) - value_at(sides[1], values)

    try:
        names = set().union(*map(names_in, (*one, *other)))
        both = [(difference(one, point), difference(other, point)) for point in points(names)]
        if all(abs(b) > 1e-12 for _, b in both):
            ratios = [a / b for a, b in both]
            if abs(ratios[0]) > 1e-12 and all(close(ratio, ratios[0], 1e-8) for ratio in ratios):
                return True
        for name in sorted(names):
            for start in points(names, 4):
                values = start | {name: start[name] * (1 + 0.6j)}
                for _ in range(60):
                    here = difference(one, values)
                    if abs(here) < 1e-12:
                        break
                    step = 1e-6
                    slope = (difference(one, values | {name: values[name] + step}) - here) / step
                    if abs(slope) < 1e-12:
                        break
                    values[name] -= here / slope
                if abs(difference(one, values)) < 1e-9 and abs(difference(other, values)) > 1e-5:
                    return False
    except UnreadableError:
        return None
    return None
