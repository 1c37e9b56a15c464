"""Tests that are code themselves. They run in a session of their own, where the model's functions are only asked for.

What a model's function returns is rebuilt there from text, so that nothing but built-in values can meet an assertion.
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import Any

from rollmill.rewards.code.bundle import CANDIDATE, CHECKER, VALUES, bundle
from rollmill.rewards.code.candidate import SandboxedSolution
from rollmill.rewards.code.results import OK, TEST_ERROR, TIMEOUT, WRONG_ANSWER, TestResult, TimeBudget
from rollmill.rewards.code.tests import CheckTest
from rollmill.sandbox import Sandbox, SandboxLimits, SandboxSession

_log = logging.getLogger(__name__)
_MESSAGE_BYTES = 64 << 20
"""What a check may pass to a function. What comes back is limited by the reward's own keys."""


async def run_check_tests(
    sandbox: Sandbox,
    candidate: SandboxedSolution,
    tests: Sequence[CheckTest],
    limits: SandboxLimits,
    time_limit_s: float,
    budget: TimeBudget,
) -> AsyncGenerator[TestResult, None]:
    """The result of each test, in order. The tests of a task share one session as long as it lives."""
    waiting = list(tests)
    roomy = replace(limits, output_bytes=max(limits.output_bytes, _MESSAGE_BYTES))
    while waiting:
        async with sandbox.session(limits=roomy) as session:
            prepared = await _prepare(session, waiting[0], time_limit_s)
            while waiting and not (prepared and session.ended):
                test = waiting.pop(0)
                check = _Check(session, candidate, budget, budget.left(time_limit_s))
                outcome = await check.run(test.code) if prepared else TEST_ERROR
                yield TestResult(test.kind, test.weight, outcome, float(outcome == OK))


async def _prepare(session: SandboxSession, test: CheckTest, time_limit_s: float) -> bool:
    """Run what stands before the checks; False if that fails, which says nothing of the model's code."""
    program = f"{bundle(VALUES, CANDIDATE, CHECKER)}\nmodule.prepare({test.setup!r}, {list(test.names)!r}, host)"
    done = await session.execute(program, time_limit_s)
    if done.outcome == "ok":
        return True
    _log.warning("the code before a task's checks fails (%s): %s", done.outcome, done.stderr.strip()[-300:])
    return False


class _Check:
    """One check, and the seconds that the model's functions have for it."""

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
        verdict: dict[str, Any] = json.loads(done.value or "")
        if verdict["outcome"] == TEST_ERROR:
            _log.warning("a task's check is wrong in itself: %s", verdict["reason"])
        return str(verdict["outcome"])

    async def _answer(self, message: str) -> str:
        """What the model's function gives to the check; no JSON object where it gives nothing, and then it stops."""
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
