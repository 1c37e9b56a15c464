"""Tests that give a program something to read and compare what it prints."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace

from rollmill.rewards.code.comparers import OutputComparer
from rollmill.rewards.code.results import COMPILE_ERROR, OK, OUTCOMES, RUNTIME_ERROR, TIMEOUT, TestResult, TimeBudget
from rollmill.rewards.code.tests import ProgramTest
from rollmill.sandbox import ProgramResult, Sandbox, SandboxLimits

_SYNTAX = ("SyntaxError", "IndentationError", "TabError")


async def run_program_tests(
    sandbox: Sandbox,
    source: str,
    tests: Sequence[ProgramTest],
    comparer: OutputComparer,
    limits: SandboxLimits,
    budget: TimeBudget,
) -> AsyncGenerator[TestResult, None]:
    """The result of each test, in order. Each is a process of its own, which sees the input of this test only."""
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
    """How a program ended, in the words of this reward."""
    outcome = OUTCOMES[result.outcome]
    if outcome == RUNTIME_ERROR and result.stderr.rstrip().rpartition("\n")[2].startswith(_SYNTAX):
        return COMPILE_ERROR
    return outcome
