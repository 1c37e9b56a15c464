"""Compares the code's output with the expected one. Runs in the trusted process, on values and text only."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import Any, Literal, Protocol

from rollmill.concurrency import FunctionThreads, FunctionTimeoutError
from rollmill.rewards.code.tests import JUDGE_FAILED, OK, WRONG_ANSWER, FunctionTest, ProgramTest
from rollmill.rewards.code.values import decode, refuse_collisions
from rollmill_sandbox import Sandbox, SandboxLimits


@dataclass(frozen=True, slots=True)
class OutputMatchOptions:
    """Rules for comparing outputs."""

    compare: Literal["lines", "exact", "tokens"] = "lines"
    tolerance: float = 1e-6
    tuples_as_lists: bool = True


def values_match(expected: Any, found: Any, rules: OutputMatchOptions) -> bool:
    """True if the encoded value `found` equals the value `expected`.

    A boolean is not a number. Integers and floats are compared as numbers; `tolerance` applies if the expected one is a
    float. nan equals nan. The work is bounded by the size of `expected`, whatever `found` is. Raises ValueError if
    `found` is not an encoded value.
    """
    if expected is None or isinstance(expected, bool):
        return found is expected
    if isinstance(expected, str):
        return isinstance(found, str) and found == expected
    if isinstance(expected, int | float):
        return _same_number(expected, found, rules)
    if not isinstance(found, list) or not found:
        return False
    tag, items = found[0], found[1:]
    if isinstance(expected, list | tuple):
        tags = ("l", "t") if rules.tuples_as_lists else ("l",) if isinstance(expected, list) else ("t",)
        pairs = zip(expected, items, strict=False)
        return tag in tags and len(items) == len(expected) and all(values_match(a, b, rules) for a, b in pairs)
    if isinstance(expected, dict):
        return tag == "d" and len(items) == 2 * len(expected) and _same_mapping(expected, items, rules)
    if isinstance(expected, set | frozenset):
        return tag in ("s", "z") and len(items) == len(expected) and _same_set(expected, items)
    return len(items) < 4 and _same_leaf(expected, decode(found))


def outputs_match(expected: str, found: str, rules: OutputMatchOptions) -> bool:
    """True if a program's output is the expected one. Takes time linear in the length of the two."""
    if expected == found:
        return True
    if rules.compare == "exact":
        return False
    if rules.compare == "lines":
        return _same_lines(expected.rstrip(), found.rstrip())
    wanted = expected.split()
    given = found.split(maxsplit=len(wanted))
    return len(wanted) == len(given) and all(
        _same_word(*pair, rules.tolerance) for pair in zip(wanted, given, strict=True)
    )


def _same_number(expected: int | float, found: Any, rules: OutputMatchOptions) -> bool:
    if isinstance(found, list):
        if len(found) != 2 or found[0] != "i":
            return False
        found = decode(found)
    if isinstance(found, bool) or not isinstance(found, int | float):
        return False
    if found == expected or (found != found and expected != expected):
        return True
    return isinstance(expected, float) and _near(expected, found, rules.tolerance)


def _near(expected: float, found: float, tolerance: float) -> bool:
    try:
        return math.isclose(expected, found, rel_tol=tolerance, abs_tol=tolerance)
    except OverflowError:  # an integer larger than any float
        return False


def _same_mapping(expected: dict[Any, Any], items: list[Any], rules: OutputMatchOptions) -> bool:
    keys = [_hashable(decode(key)) for key in items[::2]]
    refuse_collisions(keys)
    found = dict(zip(keys, items[1::2], strict=True))
    wanted = {_hashable(key): value for key, value in expected.items()}
    return wanted.keys() == found.keys() and all(values_match(wanted[key], found[key], rules) for key in wanted)


def _same_set(expected: set[Any] | frozenset[Any], items: list[Any]) -> bool:
    members = [_hashable(decode(item)) for item in items]
    refuse_collisions(members)
    return set(members) == {_hashable(item) for item in expected}


def _hashable(value: Any) -> Any:
    """Return a key or member that follows Python's equality, except that booleans are not numbers.

    Raises ValueError.
    """
    if isinstance(value, tuple):
        return tuple(map(_hashable, value))
    if isinstance(value, float) and value != value:
        return "nan", "float"
    try:
        hash(value)
    except TypeError:
        raise ValueError("a set member or a mapping key that is not hashable") from None
    return (isinstance(value, bool), value)


def _same_leaf(expected: Any, found: Any) -> bool:
    return type(expected) is type(found) and bool(expected == found)


def _same_lines(expected: str, found: str) -> bool:
    """True if every line has the same words. Lines are counted first, because splitting costs more."""
    if expected.count("\n") != found.count("\n"):
        return False
    pairs = zip(expected.split("\n"), found.split("\n"), strict=True)
    return all(wanted.split() == given.split() for wanted, given in pairs)


def _same_word(expected: str, found: str, tolerance: float) -> bool:
    """True if the words are equal, or both numbers and close; an expected integer is exact."""
    if expected == found:
        return True
    if expected.lstrip("+-").isdecimal():
        return False
    try:
        wanted, given = float(expected), float(found)
    except ValueError:
        return False
    return math.isfinite(wanted) and math.isfinite(given) and _near(wanted, given, tolerance)


# Comparers of outputs with expected ones: built-in rules, a user's function, or a task's checker program.

_LONG = 10_000
"""Characters from which an expected value or an output is compared in a thread."""
_WORDS = {"ok": 1.0, "wrong": 0.0}


class OutputComparer(Protocol):
    """Returns the outcome of a test and its credit from 0 to 1, for a returned value (encoded) or printed text."""

    async def value(self, test: FunctionTest, found: Any) -> tuple[str, float]: ...

    async def text(self, test: ProgramTest, found: str) -> tuple[str, float]: ...


class BuiltinComparer:
    """Compares by the built-in rules."""

    def __init__(self, rules: OutputMatchOptions) -> None:
        self._rules = rules

    async def value(self, test: FunctionTest, found: Any) -> tuple[str, float]:
        try:
            if test.size < _LONG:
                return _outcome(float(values_match(test.expected, found, self._rules)))
            return _outcome(float(await asyncio.to_thread(values_match, test.expected, found, self._rules)))
        except ValueError:
            return WRONG_ANSWER, 0.0

    async def text(self, test: ProgramTest, found: str) -> tuple[str, float]:
        if max(len(test.stdout), len(found)) < _LONG:
            return _outcome(float(outputs_match(test.stdout, found, self._rules)))
        return _outcome(float(await asyncio.to_thread(outputs_match, test.stdout, found, self._rules)))


class FunctionComparer:
    """Compares by a user's `(input, output, expected) -> bool | float`, in a thread.

    `input` is the program's stdin, or {"args": [...], "kwargs": {...}}; `output` is text, or a value rebuilt from
    built-in types only. Raises the function's exceptions, and ValueError for a credit outside of 0 to 1.
    """

    def __init__(self, name: str, function: Callable[..., Any], threads: FunctionThreads, time_limit_s: float) -> None:
        self._name, self._function, self._threads, self._time_limit_s = name, function, threads, time_limit_s

    async def value(self, test: FunctionTest, found: Any) -> tuple[str, float]:
        try:
            output = await asyncio.to_thread(decode, found)
        except ValueError:
            return WRONG_ANSWER, 0.0
        return await self._compare({"args": test.args, "kwargs": test.kwargs}, output, test.expected)

    async def text(self, test: ProgramTest, found: str) -> tuple[str, float]:
        return await self._compare(test.stdin, found, test.stdout)

    async def _compare(self, given: Any, output: Any, expected: Any) -> tuple[str, float]:
        try:
            found = await self._threads.call(
                self._name, partial(self._function, given, output, expected), self._time_limit_s
            )
        except FunctionTimeoutError:
            return JUDGE_FAILED, 0.0
        if not isinstance(found, Real) or not 0 <= float(found) <= 1:
            raise ValueError(
                f"judge {self._name} returned {found!r:.80}; it has to return a bool or a number from 0 to 1"
            )
        return _outcome(float(found))


class ProgramComparer:
    """Compares by a task's checker, a Python program that runs in the sandbox.

    It reads the files input.txt, output.txt and expected.txt (values as Python literals) and prints `ok`, `wrong` or a
    number from 0 to 1. Otherwise the outcome is `judge_failed`: the output may have made the checker fail.
    """

    def __init__(self, sandbox: Sandbox, program: str, limits: SandboxLimits) -> None:
        self._sandbox, self._program, self._limits = sandbox, program, limits

    async def value(self, test: FunctionTest, found: Any) -> tuple[str, float]:
        try:
            output = await asyncio.to_thread(lambda: repr(decode(found)))
        except ValueError:
            return WRONG_ANSWER, 0.0
        return await self._compare(repr({"args": test.args, "kwargs": test.kwargs}), output, repr(test.expected))

    async def text(self, test: ProgramTest, found: str) -> tuple[str, float]:
        return await self._compare(test.stdin, found, test.stdout)

    async def _compare(self, given: str, output: str, expected: str) -> tuple[str, float]:
        texts = {"input.txt": given, "output.txt": output, "expected.txt": expected}
        files = {name: text.encode(errors="surrogatepass") for name, text in texts.items()}
        result = await self._sandbox.run(self._program, files=files, limits=self._limits)
        credit = _credit(result.stdout) if result.outcome == "ok" else None
        return (JUDGE_FAILED, 0.0) if credit is None else _outcome(credit)


def _outcome(credit: float) -> tuple[str, float]:
    return (OK if credit == 1.0 else WRONG_ANSWER), credit


def _credit(printed: str) -> float | None:
    """Parse a checker's output as a number from 0 to 1; None if it is neither that nor a known word."""
    word = printed.strip().casefold()
    if word in _WORDS:
        return _WORDS[word]
    try:
        found = float(word)
    except ValueError:
        return None
    return found if math.isfinite(found) and 0 <= found <= 1 else None
