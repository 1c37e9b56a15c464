"""How tests ended, and what that earns."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

OK: Final = "ok"
NO_CODE, TOO_LONG, COMPILE_ERROR, RUNTIME_ERROR = "no_code", "too_long", "compile_error", "runtime_error"
WRONG_ANSWER, TIMEOUT, MEMORY, OUTPUT = "wrong_answer", "timeout", "memory", "output"
TEST_ERROR, JUDGE_FAILED = "test_error", "judge_failed"
OUTCOMES: Final = {
    "ok": OK,
    "error": RUNTIME_ERROR,
    "killed": RUNTIME_ERROR,
    "ended": RUNTIME_ERROR,
    "timeout": TIMEOUT,
    "memory": MEMORY,
    "output": OUTPUT,
}
"""An outcome of the sandbox -> that of a test."""
FATAL_OUTCOMES: Final = frozenset((COMPILE_ERROR, TIMEOUT, MEMORY))
"""After one of these with `credit: all` the other tests are not run: they would cost as much and change nothing."""


@dataclass(frozen=True, slots=True)
class TestResult:
    """How one test ended. `credit` is from 0 to 1; less than 1 only with a judge of the user's own."""

    __test__ = False  # not for pytest

    kind: str
    weight: float
    outcome: str
    credit: float = 0.0


@dataclass(slots=True)
class TimeBudget:
    """The time for all tests of a completion, in seconds; it runs from when this is made."""

    total_s: float
    since: float = field(default_factory=time.monotonic)

    def left(self, most: float) -> float:
        """What is left of it, at most `most`; 0 when it is used up."""
        return max(0.0, min(most, self.total_s - (time.monotonic() - self.since)))


def suite_outcome(results: Sequence[TestResult]) -> str:
    """That of the first test that does not pass; "ok" if all do."""
    return next((result.outcome for result in results if result.outcome != OK), OK)


def suite_credit(results: Sequence[TestResult], credit: Literal["all", "fraction"]) -> float:
    """1 for passing every test, or the weight of what passes as a part of the weight of all."""
    if credit == "all":
        return min(result.credit if result.outcome == OK else 0.0 for result in results)
    return mean_credit(results)


def mean_credit(results: Sequence[TestResult]) -> float:
    """The weighted mean of the credits; exactly 1 if all of them are."""
    if all(result.credit == 1.0 for result in results):
        return 1.0
    total = sum(result.weight for result in results)
    return sum(result.weight / total * result.credit for result in results)
