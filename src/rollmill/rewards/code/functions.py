"""Tests that call the model's functions and compare what they return."""

from __future__ import annotations

import builtins
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from rollmill.rewards.code.candidate import CallResult, SandboxedSolution
from rollmill.rewards.code.comparers import OutputComparer
from rollmill.rewards.code.results import OK, OUTPUT, RUNTIME_ERROR, TIMEOUT, WRONG_ANSWER, TestResult, TimeBudget
from rollmill.rewards.code.tests import FunctionTest

_CONTAINERS = 50_000
"""That a value may have beyond as many as the expected one can have."""


async def run_function_tests(
    candidate: SandboxedSolution,
    tests: Sequence[FunctionTest],
    comparer: OutputComparer,
    time_limit_s: float,
    budget: TimeBudget,
) -> AsyncGenerator[TestResult, None]:
    """The result of each test, in order. The arguments go in as text, and an encoded value comes out."""
    for test in tests:
        wall_s = budget.left(time_limit_s)
        answer = CallResult(TIMEOUT)
        if wall_s > 0:
            answer = await candidate.call(test.call, test.arguments, wall_s)
        outcome, credit = answer.outcome, 0.0
        if outcome == OK:
            outcome, credit = await _judged(test, answer.reply(_CONTAINERS + test.size), comparer)
        yield TestResult(test.kind, test.weight, outcome, credit)


async def _judged(test: FunctionTest, reply: dict[str, Any], comparer: OutputComparer) -> tuple[str, float]:
    if "value" not in reply:
        raised = reply.get("raised")
        if test.raises is not None and _is_a(raised, test.raises):
            return OK, 1.0
        return (OUTPUT if "too_large" in reply else RUNTIME_ERROR), 0.0
    if test.raises is not None:
        return WRONG_ANSWER, 0.0
    return await comparer.value(test, reply["value"])


def _is_a(raised: Any, expected: str) -> bool:
    found = getattr(builtins, raised, None) if isinstance(raised, str) else None
    return isinstance(found, type) and issubclass(found, getattr(builtins, expected))
