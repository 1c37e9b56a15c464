"""Runs tests that are code. They run in a separate session, in which the model's functions are remote calls.

Their return values are rebuilt from text, so that an assertion sees only built-in values.
"""

from __future__ import annotations

import builtins
import json
import logging
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import Any

from rollmill.rewards.code.candidate import CANDIDATE, CHECKER, VALUES, CallResult, SandboxedSolution, bundle
from rollmill.rewards.code.comparison import OutputComparer
from rollmill.rewards.code.tests import (
    COMPILE_ERROR,
    OK,
    OUTCOMES,
    OUTPUT,
    RUNTIME_ERROR,
    TEST_ERROR,
    TIMEOUT,
    WRONG_ANSWER,
    CheckTest,
    FunctionTest,
    ProgramTest,
    TestResult,
    TimeBudget,
)
from rollmill_sandbox import ProgramResult, Sandbox, SandboxLimits, SandboxSession

_log = logging.getLogger(__name__)
_MESSAGE_BYTES = 64 << 20
"""Bytes that a check may pass to a function. Replies are limited by the reward's keys."""


async def run_check_tests(
    sandbox: Sandbox,
    candidate: SandboxedSolution,
    tests: Sequence[CheckTest],
    limits: SandboxLimits,
    time_limit_s: float,
    budget: TimeBudget,
) -> AsyncGenerator[TestResult, None]:
    """Yield the result of each test, in order. The tests of a task share one session while it is alive."""
    waiting = list(tests)
    session_limits = replace(limits, output_bytes=max(limits.output_bytes, _MESSAGE_BYTES))
    while waiting:
        async with sandbox.session(limits=session_limits) as session:
            prepared = await _prepare(session, waiting[0], time_limit_s)
            while waiting and not (prepared and session.ended):
                test = waiting.pop(0)
                check = _Check(session, candidate, budget, budget.left(time_limit_s))
                outcome = await check.run(test.code) if prepared else TEST_ERROR
                yield TestResult(test.kind, test.weight, outcome, float(outcome == OK))


async def _prepare(session: SandboxSession, test: CheckTest, time_limit_s: float) -> bool:
    """Run the setup code; False if that fails, which is not the fault of the model's code."""
    program = f"{bundle(VALUES, CANDIDATE, CHECKER)}\nmodule.prepare({test.setup!r}, {list(test.names)!r}, host)"
    done = await session.execute(program, time_limit_s)
    if done.outcome == "ok":
        return True
    _log.warning("the code before a task's checks fails (%s): %s", done.outcome, done.stderr.strip()[-300:])
    return False


class _Check:
    """One check, and the seconds left for the model's functions in it."""

    def __init__(
        self, session: SandboxSession, candidate: SandboxedSolution, budget: TimeBudget, wall_s: float
    ) -> None:
        self._session, self._candidate, self._budget = session, candidate, budget
        self._wall_s = self._left = wall_s
        self._stopped = ""

    async def run(self, code: str) -> str:
        if self._wall_s <= 0:
            return TIMEOUT
        done = await self._session.execute(f"module.check({code!r})", self._wall_s, self._answer)
        if self._stopped:
            return self._stopped
        if done.outcome != "ok":
            return TIMEOUT if done.outcome == "timeout" else WRONG_ANSWER
        result: dict[str, Any] = json.loads(done.value or "")
        if result["outcome"] == TEST_ERROR:
            _log.warning("a task's check is wrong in itself: %s", result["reason"])
        return str(result["outcome"])

    async def _answer(self, message: str) -> str:
        """Return the reply of the model's function to the check; after a failure "null", and the check stops."""
        name, arguments = json.loads(message)
        wall_s = self._budget.left(self._left)
        if self._stopped or wall_s <= 0:
            self._stopped = self._stopped or TIMEOUT
            return "null"
        answer = await self._candidate.call(name, arguments, wall_s, changes=True)
        self._left -= answer.seconds
        if answer.outcome != OK:
            self._stopped = answer.outcome
            return "null"
        return answer.text


# Runs tests that call the model's functions and compares their results.

_CONTAINERS = 50_000
"""Containers that a value may have in addition to the maximum of the expected one."""


async def run_function_tests(
    candidate: SandboxedSolution,
    tests: Sequence[FunctionTest],
    comparer: OutputComparer,
    time_limit_s: float,
    budget: TimeBudget,
) -> AsyncGenerator[TestResult, None]:
    """Yield the result of each test, in order. Arguments are sent as text; results come back as encoded values."""
    for test in tests:
        wall_s = budget.left(time_limit_s)
        answer = CallResult(TIMEOUT)
        if wall_s > 0:
            answer = await candidate.call(test.call, test.arguments, wall_s)
        outcome, credit = answer.outcome, 0.0
        if outcome == OK:
            outcome, credit = await _test_result(test, answer.reply(_CONTAINERS + test.size), comparer)
        yield TestResult(test.kind, test.weight, outcome, credit)


async def _test_result(test: FunctionTest, reply: dict[str, Any], comparer: OutputComparer) -> tuple[str, float]:
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


# Runs tests that give a program its stdin and compare its output.

_SYNTAX = ("SyntaxError", "IndentationError", "TabError")


async def run_program_tests(
    sandbox: Sandbox,
    source: str,
    tests: Sequence[ProgramTest],
    comparer: OutputComparer,
    limits: SandboxLimits,
    budget: TimeBudget,
) -> AsyncGenerator[TestResult, None]:
    """Yield the result of each test, in order. Each runs in a separate process, which sees only this test's input."""
    for test in tests:
        wall_s = budget.left(limits.wall_s)
        outcome, credit = TIMEOUT, 0.0
        if wall_s > 0:
            result = await sandbox.run(source, test.stdin, limits=replace(limits, wall_s=wall_s))
            outcome = program_outcome(result)
            if outcome == OK:
                outcome, credit = await comparer.text(test, result.stdout)
        yield TestResult(test.kind, test.weight, outcome, credit)
        if outcome == COMPILE_ERROR:
            break


def program_outcome(result: ProgramResult) -> str:
    """Map a program's outcome to an outcome of this reward."""
    outcome = OUTCOMES[result.outcome]
    if outcome == RUNTIME_ERROR and result.stderr.rstrip().rpartition("\n")[2].startswith(_SYNTAX):
        return COMPILE_ERROR
    return outcome
