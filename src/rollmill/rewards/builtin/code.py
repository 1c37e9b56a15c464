"""The code reward: extracts the code, runs the tests and computes the credit."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from rollmill.config.rewards import Reward
from rollmill.errors import ConfigError
from rollmill.rewards.base import NO_ANSWER, Score, find_answer
from rollmill.types import Completion, Task

if TYPE_CHECKING:
    from rollmill.rewards.code.comparison import FunctionComparer, OutputComparer, OutputMatchOptions
    from rollmill.rewards.code.tests import Suite, Test, TestResult
    from rollmill.rewards.resources import RewardResources
    from rollmill_sandbox import Sandbox, SandboxLimits
    from rollmill_sandbox.semaphore import FairSemaphore

_LONG = 50_000
"""Characters from which a completion's code is extracted in a thread."""
_log = logging.getLogger(__name__)


class CodeReward(Reward):
    """1 if a Python function or program passes the task's tests in the sandbox, else 0 or the fraction of tests
    passed."""

    decides = True
    largest = 1.0
    timeout_is_verdict = True
    name: Literal["code"]
    credit: Literal["all", "fraction"] = "all"
    """`all`: 1 if every test passes, else 0. `fraction`: the weight of passed tests over the weight of all tests."""
    kinds: list[str] = []
    """Kinds of tests to run, such as visible, hidden and generated. Empty: all."""
    extract: Literal["auto", "fence", "whole"] = "auto"
    """Location of the code in the answer: the last fenced block, all of it, or (`auto`) a fenced block if there is one,
    else all of it. Code in reasoning is never run."""
    time_limit_s: float = Field(5.0, gt=0)
    """Timeout of one test (for a check function, of all that it does)."""
    total_limit_s: float = Field(30.0, gt=0)
    """Timeout of all tests of one completion. Tests that did not run fail as `timeout`."""
    memory_mb: int = Field(512, ge=32)
    """Address space of the code's process, MiB."""
    output_kb: int = Field(1024, ge=1)
    """Maximum output of one test, and maximum size of a returned value, KiB."""
    packages: list[str] = []
    """Import names of packages that the code may use besides the standard library, and their dependencies."""
    compare: Literal["lines", "exact", "tokens"] = "lines"
    """Comparison of program output: line by line ignoring the amount of white space, exactly, or word by word with
    `tolerance` for numbers that are not integers."""
    tolerance: float = Field(1e-6, ge=0, lt=1)
    """Accepted absolute or relative error where the expected number is a float; for programs with `compare: tokens`."""
    tuples_as_lists: bool = True
    """Whether tuples and lists are interchangeable."""
    judge: str | None = None
    """FILE.py:NAME of a function `(input, output, expected) -> bool | float from 0 to 1` that replaces the comparison;
    it runs under `time_limit_s`."""
    jobs: int = Field(0, ge=0)
    """Maximum number of completions tested at the same time. 0: one per CPU core."""
    sandbox: Literal["auto", "namespaces", "landlock", "plain"] = "auto"
    """Isolation of code; `auto` is the first backend that works on this machine. `plain` isolates nothing."""
    _sandbox: Sandbox
    _limits: SandboxLimits
    _turns: FairSemaphore
    _suites: SuiteCache
    _judge: FunctionComparer | None

    def applies_to(self, task: Task) -> bool:
        return any(task.metadata.get(column) for column in ("tests", "test", "test_list"))

    def setup(self, resources: RewardResources) -> None:
        """Raise ConfigError if `judge` cannot be loaded, SandboxError if there is no safe sandbox."""
        from rollmill.program_sandbox import ProgramSandbox
        from rollmill_sandbox.semaphore import FairSemaphore

        packages, jobs, backend = tuple(sorted(self.packages)), self.jobs, self.sandbox
        if backend == "plain":
            _log.warning("the code reward has `sandbox: plain`: the model's code runs without any isolation")
        self._sandbox = resources.shared(  # all rewards of a manager with the same settings have one
            f"sandbox {backend} {jobs} {' '.join(packages)}",
            lambda: ProgramSandbox(packages=packages, jobs=jobs, backend=backend),
        )
        self._turns = FairSemaphore(jobs or os.cpu_count() or 1)
        self._limits = self.sandbox_limits()
        self._suites = SuiteCache(self.output_kb)
        self._judge = None
        if self.judge is not None:
            from rollmill.rewards.code.comparison import FunctionComparer
            from rollmill.user_code import import_object

            function = import_object(self.judge)
            if not callable(function):
                raise ConfigError(f"judge {self.judge} is a {type(function).__name__}, not a function")
            self._judge = FunctionComparer(self.judge, function, resources.threads, self.time_limit_s)

    def sandbox_limits(self) -> SandboxLimits:
        """Return the limits of one test."""
        from rollmill_sandbox import SandboxLimits

        return SandboxLimits(
            wall_s=self.time_limit_s,
            cpu_s=int(self.time_limit_s) + 1,
            memory_mb=self.memory_mb,
            output_bytes=self.output_kb << 10,
        )

    def match_options(self) -> OutputMatchOptions:
        """Return the rules for comparing outputs."""
        from rollmill.rewards.code.comparison import OutputMatchOptions

        return OutputMatchOptions(self.compare, self.tolerance, self.tuples_as_lists)

    async def score(self, task: Task, completion: Completion) -> Score:
        """Return the score of a completion by its task's tests; none for a task without tests.

        Expected values and check code never enter the process that runs the model's code.
        """
        import asyncio

        from rollmill.rewards.code.extraction import MAX_CODE_CHARS, extract_code, join_prefix
        from rollmill.rewards.code.tests import NO_CODE, TOO_LONG

        suite = await self._suites.of(task)
        tests = [test for test in suite.tests if not self.kinds or test.kind in self.kinds] if suite else []
        if suite is None or not tests:
            return Score(None)
        if (text := find_answer(completion)) is None:
            return Score(0.0, NO_ANSWER)
        if len(text) < _LONG:
            code = extract_code(text, self.extract, suite.entry_point)
        else:
            code = await asyncio.to_thread(extract_code, text, self.extract, suite.entry_point)
        if code is None:
            return Score(0.0, NO_CODE)
        if len(code) > MAX_CODE_CHARS:
            return Score(0.0, TOO_LONG)
        source = join_prefix(suite.prefix, code, suite.entry_point) if suite.prefix else code
        started = time.perf_counter()
        async with self._turns.turn_async():
            queue_s = time.perf_counter() - started
            results = await self._run(suite, tests, source)
        return self._credit(tests, results, queue_s)

    async def _run(self, suite: Suite, tests: Sequence[Any], source: str) -> list[TestResult]:
        """Return the results of the tests that were run, in order."""
        from rollmill.rewards.code.candidate import SandboxedSolution
        from rollmill.rewards.code.comparison import BuiltinComparer, ProgramComparer
        from rollmill.rewards.code.runners import run_check_tests, run_function_tests, run_program_tests
        from rollmill.rewards.code.tests import FATAL_OUTCOMES, CheckTest, FunctionTest, TimeBudget

        sandbox, limits, budget = self._sandbox, self._limits, TimeBudget(self.total_limit_s)
        comparer: OutputComparer
        if suite.checker is not None:
            comparer = ProgramComparer(sandbox, suite.checker, limits)
        else:
            comparer = self._judge or BuiltinComparer(self.match_options())
        found: list[TestResult] = []
        async with SandboxedSolution(sandbox, source, limits) as candidate:
            match tests[0]:
                case FunctionTest():
                    running = run_function_tests(candidate, tests, comparer, self.time_limit_s, budget)
                case CheckTest():
                    running = run_check_tests(sandbox, candidate, tests, limits, self.time_limit_s, budget)
                case _:
                    running = run_program_tests(sandbox, source, tests, comparer, limits, budget)
            async with aclosing(running) as results:
                async for result in results:
                    found.append(result)
                    if result.outcome in FATAL_OUTCOMES and self.credit == "all":
                        break
        return found

    def _credit(self, tests: Sequence[Test], results: list[TestResult], queue_s: float) -> Score:
        from rollmill.rewards.code.tests import TIMEOUT, TestResult, mean_credit, suite_credit, suite_outcome

        last = suite_outcome(results)
        results = results + [TestResult(test.kind, test.weight, last) for test in tests[len(results) :]]
        value = suite_credit(results, self.credit)
        if last == TIMEOUT and value == 0.0:
            value = self.timeout_reward
        kinds = dict.fromkeys(test.kind for test in tests)
        details = {kind: mean_credit([result for result in results if result.kind == kind]) for kind in kinds}
        return Score(value, last, queue_s, details=details)


class SuiteCache:
    """Caches the tests of the most recent tasks: a group requests the same ones once per completion."""

    def __init__(self, output_kb: int, most: int = 64) -> None:
        self._output_kb, self._most = output_kb, most
        self._read: dict[int, tuple[Task, Suite | None]] = {}
        self._lock = threading.Lock()

    async def of(self, task: Task) -> Suite | None:
        """Return the tests of a task, None if it has none. They are read in a thread.

        Raises ValueError like `read_suite`, and for a test that no answer can pass under `output_kb`.
        """
        import asyncio

        if id(task) in self._read:
            return self._read[id(task)][1]
        return await asyncio.to_thread(self._of, task)

    def _of(self, task: Task) -> Suite | None:
        with self._lock:
            if id(task) not in self._read:
                while len(self._read) >= self._most:
                    del self._read[next(iter(self._read))]
                from rollmill.rewards.code.tests import read_suite

                suite = read_suite(task.metadata)
                _refuse_long(suite, self._output_kb)
                self._read[id(task)] = task, suite
            return self._read[id(task)][1]


def _refuse_long(suite: Suite | None, output_kb: int) -> None:
    from rollmill.rewards.code.tests import FunctionTest, ProgramTest

    for number, test in enumerate(suite.tests if suite else [], 1):
        if isinstance(test, FunctionTest | ProgramTest) and test.size > output_kb << 10:
            raise ValueError(
                f"test {number} of column `tests` expects {test.size} bytes, and `output_kb` allows {output_kb} KiB; "
                "set it higher or leave the test out"
            )
