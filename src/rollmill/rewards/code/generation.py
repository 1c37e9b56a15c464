"""Generates test cases and validates them with reference submissions, as in Kimi k1.5 (arXiv:2501.12599).

A generator writes cases. A case is valid if enough submissions give the same output, which becomes the expected one. A
problem is kept if enough submissions pass all of its valid cases.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollmill.python_source import parse_literal
from rollmill.rewards.code.candidate import SandboxedSolution
from rollmill.rewards.code.comparison import OutputMatchOptions, outputs_match, values_match
from rollmill.rewards.code.tests import GENERATED
from rollmill.rewards.code.values import decode, encode, encode_text
from rollmill_sandbox import Sandbox, SandboxLimits

Generator = str | Callable[[int], Any]
_AT_ONCE = 8
_CONTAINERS = 1_000_000


@dataclass(frozen=True, slots=True)
class CodingProblem:
    """A problem that needs tests.

    `generator` is a program that reads a number and prints a case, the same one for the same number; or a function from
    a number to a case. A case is a program's stdin; for functions (with `entry_point`) it is the list of arguments,
    which a generator program prints as a Python literal. `submissions` are programs that are mostly right.
    """

    generator: Generator
    submissions: Sequence[str]
    entry_point: str | None = None


@dataclass(frozen=True, slots=True)
class ValidationCriteria:
    """Number of cases, and thresholds for cases and problems. The defaults are Kimi's."""

    cases: int = 50
    submissions: int = 10
    agree: int = 7
    """Submissions that must agree on the output of a case."""
    solve: int = 9
    """Submissions that must pass all valid cases of a problem."""

    def __post_init__(self) -> None:
        for name in ("agree", "solve"):
            if not 1 <= getattr(self, name) <= self.submissions:
                raise ValueError(
                    f"{name} is {getattr(self, name)}; it has to be from 1 to submissions ({self.submissions})"
                )


@dataclass(frozen=True, slots=True)
class GeneratedTestCases:
    """The tests of a problem: rows of a column `tests`, empty if it is dropped, with the `reason`."""

    tests: list[dict[str, Any]] = field(default_factory=list)
    reason: str | None = None
    cases: int = 0
    valid: int = 0
    solved: int = 0
    """Submissions that pass all valid cases."""


async def generate_tests(
    problem: CodingProblem,
    sandbox: Sandbox,
    criteria: ValidationCriteria | None = None,
    rules: OutputMatchOptions | None = None,
    limits: SandboxLimits | None = None,
) -> GeneratedTestCases:
    """Generate and validate the tests of a problem. `rules` define which outputs agree; `limits` apply to one case.

    Raises the exceptions of a generator function; a generator program that fails skips its case.
    """
    criteria, rules, limits = criteria or ValidationCriteria(), rules or OutputMatchOptions(), limits or sandbox.limits
    submissions = problem.submissions[: criteria.submissions]
    if len(submissions) < criteria.submissions:
        return GeneratedTestCases(reason=f"{len(submissions)} submissions of {criteria.submissions}")
    cases = await _cases(problem, sandbox, criteria.cases, limits)
    if not cases:
        return GeneratedTestCases(reason="the generator makes no cases")
    turns = asyncio.Semaphore(_AT_ONCE)
    alike = _values_alike if problem.entry_point else _texts_alike

    async def outputs(source: str) -> list[Any]:
        async with turns:
            if problem.entry_point:
                return await _returned(sandbox, source, problem.entry_point, cases, limits)
            return await _printed(sandbox, source, cases, limits)

    rows = await asyncio.gather(*(outputs(source) for source in submissions))
    expected = [_agreed(column, criteria.agree, alike, rules) for column in zip(*rows, strict=True)]
    valid = [index for index, output in enumerate(expected) if output is not None]
    if not valid:
        reason = f"{criteria.agree} of {criteria.submissions} submissions agree on none of the {len(cases)} cases"
        return GeneratedTestCases(reason=reason, cases=len(cases))
    solved = sum(all(alike(expected[index], row[index], rules) for index in valid) for row in rows)
    if solved < criteria.solve:
        reason = f"{solved} of {len(rows)} submissions pass all {len(valid)} valid cases; {criteria.solve} are needed"
        return GeneratedTestCases([], reason, len(cases), len(valid), solved)
    tests = [_test(problem.entry_point, cases[index], expected[index]) for index in valid]
    return GeneratedTestCases(tests, None, len(cases), len(valid), solved)


async def _cases(problem: CodingProblem, sandbox: Sandbox, count: int, limits: SandboxLimits) -> list[Any]:
    """Return the distinct cases, in the order of their numbers."""
    found = await asyncio.gather(*(_case(problem, sandbox, number, limits) for number in range(1, count + 1)))
    different = {repr(case): case for case in found if case is not None}
    return list(different.values())


async def _case(problem: CodingProblem, sandbox: Sandbox, number: int, limits: SandboxLimits) -> Any:
    """Return the stdin text, or the list of arguments; None if the generator gives neither."""
    if callable(problem.generator):
        return await asyncio.to_thread(problem.generator, number)
    result = await sandbox.run(problem.generator, f"{number}\n", limits=limits)
    if result.outcome != "ok":
        return None
    if problem.entry_point is None:
        return result.stdout
    try:
        args = parse_literal(result.stdout.strip())
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None
    return list(args) if isinstance(args, list | tuple) else None


async def _printed(sandbox: Sandbox, source: str, cases: Sequence[str], limits: SandboxLimits) -> list[str | None]:
    """Return a program's output for each case; None if it fails."""
    results = [await sandbox.run(source, case, limits=limits) for case in cases]
    return [result.stdout if result.outcome == "ok" else None for result in results]


async def _returned(sandbox: Sandbox, source: str, name: str, cases: Sequence[Any], limits: SandboxLimits) -> list[Any]:
    """Return a function's encoded value for each case, in a list; None if it fails."""
    found: list[Any] = []
    async with SandboxedSolution(sandbox, source, limits) as candidate:
        for args in cases:
            answer = await candidate.call(name, encode_text([args, {}]), limits.wall_s)
            reply = answer.reply(_CONTAINERS) if answer.outcome == "ok" else {}
            found.append([reply["value"]] if "value" in reply and _is_literal(reply["value"]) else None)
    return found


def _agreed(
    outputs: Sequence[Any], agree: int, alike: Callable[[Any, Any, OutputMatchOptions], bool], rules: OutputMatchOptions
) -> Any:
    """Return the output that most submissions give, None if fewer than `agree` do."""
    counts = [sum(alike(one, other, rules) for other in outputs) for one in outputs]
    best = max(range(len(outputs)), key=lambda index: counts[index])
    return outputs[best] if counts[best] >= agree else None


def _texts_alike(one: str | None, other: str | None, rules: OutputMatchOptions) -> bool:
    return one is not None and other is not None and outputs_match(one, other, rules)


def _values_alike(one: list[Any] | None, other: list[Any] | None, rules: OutputMatchOptions) -> bool:
    return one is not None and other is not None and values_match(decode(one[0]), other[0], rules)


def _is_literal(tree: Any) -> bool:
    """True if a value can be written into a row of tests, as a Python literal."""
    try:
        value = decode(tree)
        return bool(encode(parse_literal(repr(value))) == encode(value))
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return False


def _test(entry_point: str | None, case: Any, expected: Any) -> dict[str, Any]:
    if entry_point is None:
        return {"stdin": case, "stdout": expected, "kind": GENERATED}
    args, value = [repr(arg) for arg in case], repr(decode(expected[0]))
    return {"call": entry_point, "args": args, "expected": value, "literals": True, "kind": GENERATED}
