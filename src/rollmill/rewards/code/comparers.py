"""What compares an output with the expected one: the built-in rules, a user's function, or a task's checker program."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from functools import partial
from numbers import Real
from typing import Any, Protocol

from rollmill.rewards.code.comparison import OutputMatchOptions, outputs_match, values_match
from rollmill.rewards.code.results import JUDGE_FAILED, OK, WRONG_ANSWER
from rollmill.rewards.code.tests import FunctionTest, ProgramTest
from rollmill.rewards.code.values import decode
from rollmill.rewards.function_threads import FunctionThreads, FunctionTimeoutError
from rollmill.sandbox import Sandbox, SandboxLimits

_LONG = 10_000
"""Characters of an expected value, or of an output, that is compared in a thread."""
_WORDS = {"ok": 1.0, "wrong": 0.0}


class OutputComparer(Protocol):
    """Gives the outcome of a test and its credit from 0 to 1, for what the code returned (encoded) or printed."""

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

    `input` is what the program reads, or {"args": [...], "kwargs": {...}}; `output` is text, or a value made anew of
    built-in types only. Raises what the function raises, and ValueError for a credit outside of 0 to 1.
    """

    def __init__(self, name: str, function: Callable[..., Any], threads: FunctionThreads, time_limit_s: float) -> None:
        self._name, self._function, self._threads, self._time_limit_s = name, function, threads, time_limit_s

    async def value(self, test: FunctionTest, found: Any) -> tuple[str, float]:
        try:
            output = await asyncio.to_thread(decode, found)
        except ValueError:
            return WRONG_ANSWER, 0.0
        return await self._asked({"args": test.args, "kwargs": test.kwargs}, output, test.expected)

    async def text(self, test: ProgramTest, found: str) -> tuple[str, float]:
        return await self._asked(test.stdin, found, test.stdout)

    async def _asked(self, given: Any, output: Any, expected: Any) -> tuple[str, float]:
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
    number from 0 to 1. One that does not is the outcome `judge_failed`: the output may have made it fail.
    """

    def __init__(self, sandbox: Sandbox, program: str, limits: SandboxLimits) -> None:
        self._sandbox, self._program, self._limits = sandbox, program, limits

    async def value(self, test: FunctionTest, found: Any) -> tuple[str, float]:
        try:
            output = await asyncio.to_thread(lambda: repr(decode(found)))
        except ValueError:
            return WRONG_ANSWER, 0.0
        return await self._asked(repr({"args": test.args, "kwargs": test.kwargs}), output, repr(test.expected))

    async def text(self, test: ProgramTest, found: str) -> tuple[str, float]:
        return await self._asked(test.stdin, found, test.stdout)

    async def _asked(self, given: str, output: str, expected: str) -> tuple[str, float]:
        texts = {"input.txt": given, "output.txt": output, "expected.txt": expected}
        files = {name: text.encode(errors="surrogatepass") for name, text in texts.items()}
        result = await self._sandbox.run(self._program, files=files, limits=self._limits)
        credit = _credit(result.stdout) if result.outcome == "ok" else None
        return (JUDGE_FAILED, 0.0) if credit is None else _outcome(credit)


def _outcome(credit: float) -> tuple[str, float]:
    return (OK if credit == 1.0 else WRONG_ANSWER), credit


def _credit(printed: str) -> float | None:
    """What a checker printed as a number from 0 to 1; None if it is neither that nor a verdict."""
    word = printed.strip().casefold()
    if word in _WORDS:
        return _WORDS[word]
    try:
        found = float(word)
    except ValueError:
        return None
    return found if math.isfinite(found) and 0 <= found <= 1 else None
