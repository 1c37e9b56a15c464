"""The code reward: extracts the code, runs the tests and computes the credit."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from rollmill.config.rewards.code import CodeExtraction, CodeReward
from rollmill.errors import ConfigError
from rollmill.program_sandbox import ProgramSandbox
from rollmill.registry import import_object
from rollmill.rewards.base import NO_ANSWER, Score, find_answer
from rollmill.rewards.code.candidate import SandboxedSolution
from rollmill.rewards.code.comparison import (
    BuiltinComparer,
    FunctionComparer,
    OutputComparer,
    ProgramComparer,
    output_match_options,
)
from rollmill.rewards.code.extraction import MAX_CODE_CHARS, extract_code, join_prefix
from rollmill.rewards.code.runners import run_check_tests, run_function_tests, run_program_tests
from rollmill.rewards.code.tests import (
    FATAL_OUTCOMES,
    NO_CODE,
    TIMEOUT,
    TOO_LONG,
    CheckTest,
    FunctionTest,
    ProgramTest,
    Suite,
    Test,
    TestResult,
    TimeBudget,
    mean_credit,
    read_suite,
    suite_credit,
    suite_outcome,
)
from rollmill.rewards.resources import RewardResources
from rollmill.types import Completion, Task
from rollmill_sandbox import Sandbox, SandboxLimits
from rollmill_sandbox.semaphore import FairSemaphore

_LONG = 50_000
"""Characters from which a completion's code is extracted in a thread."""
_log = logging.getLogger(__name__)


class CodeScorer:
    """Scores a completion by a task's tests. A task without tests has no reward.

    Expected values and check code never enter the process that runs the model's code. Raises ConfigError if `judge`
    cannot be loaded, SandboxError if there is no safe sandbox.
    """

    def __init__(self, config: CodeReward, resources: RewardResources) -> None:
        self._config = config
        self._sandbox = shared_sandbox(config, resources)
        self._turns = FairSemaphore(config.jobs or os.cpu_count() or 1)
        self._limits = sandbox_limits(config)
        self._suites = SuiteCache(config.output_kb)
        self._judge = None if config.judge is None else _user_comparer(config.judge, config.time_limit_s, resources)

    async def score(self, task: Task, completion: Completion) -> Score:
        suite = await self._suites.of(task)
        tests = [test for test in suite.tests if self._is_enabled(test)] if suite else []
        if suite is None or not tests:
            return Score(None)
        if (text := find_answer(completion)) is None:
            return Score(0.0, NO_ANSWER)
        code = await _extract_code(text, self._config.extract, suite.entry_point)
        if code is None:
            return Score(0.0, NO_CODE)
        if len(code) > MAX_CODE_CHARS:
            return Score(0.0, TOO_LONG)
        source = join_prefix(suite.prefix, code, suite.entry_point) if suite.prefix else code
        started = time.perf_counter()
        async with self._turns.turn_async():
            queue_s = time.perf_counter() - started
            results = await self._run(suite, tests, source)
        return self._score(tests, results, queue_s)

    def _is_enabled(self, test: Test) -> bool:
        return not self._config.kinds or test.kind in self._config.kinds

    async def _run(self, suite: Suite, tests: Sequence[Test], source: str) -> list[TestResult]:
        """Return the results of the tests that were run, in order."""
        found: list[TestResult] = []
        comparer, budget = self._comparer(suite), TimeBudget(self._config.total_limit_s)
        async with (
            SandboxedSolution(self._sandbox, source, self._limits) as candidate,
            aclosing(self._results(tests, source, candidate, comparer, budget)) as results,
        ):
            async for result in results:
                found.append(result)
                if result.outcome in FATAL_OUTCOMES and self._config.credit == "all":
                    break
        return found

    def _results(
        self,
        tests: Sequence[Any],
        source: str,
        candidate: SandboxedSolution,
        comparer: OutputComparer,
        budget: TimeBudget,
    ) -> AsyncGenerator[TestResult, None]:
        limit = self._config.time_limit_s
        match tests[0]:
            case FunctionTest():
                return run_function_tests(candidate, tests, comparer, limit, budget)
            case CheckTest():
                return run_check_tests(self._sandbox, candidate, tests, self._limits, limit, budget)
        return run_program_tests(self._sandbox, source, tests, comparer, self._limits, budget)

    def _comparer(self, suite: Suite) -> OutputComparer:
        if suite.checker is not None:
            return ProgramComparer(self._sandbox, suite.checker, self._limits)
        return self._judge or BuiltinComparer(output_match_options(self._config))

    def _score(self, tests: Sequence[Test], results: list[TestResult], queue_s: float) -> Score:
        last = suite_outcome(results)
        results = results + [TestResult(test.kind, test.weight, last) for test in tests[len(results) :]]
        value = suite_credit(results, self._config.credit)
        if last == TIMEOUT and value == 0.0:
            value = self._config.timeout_reward
        kinds = dict.fromkeys(test.kind for test in tests)
        details = {kind: mean_credit([result for result in results if result.kind == kind]) for kind in kinds}
        return Score(value, last, queue_s, details=details)


async def _extract_code(text: str, place: CodeExtraction, name: str | None) -> str | None:
    """Run `extract_code`, in a thread if the text is so long that it would block the event loop."""
    if len(text) < _LONG:
        return extract_code(text, place, name)
    return await asyncio.to_thread(extract_code, text, place, name)


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
        if id(task) in self._read:
            return self._read[id(task)][1]
        return await asyncio.to_thread(self._of, task)

    def _of(self, task: Task) -> Suite | None:
        with self._lock:
            if id(task) not in self._read:
                while len(self._read) >= self._most:
                    del self._read[next(iter(self._read))]
                suite = read_suite(task.metadata)
                _refuse_long(suite, self._output_kb)
                self._read[id(task)] = task, suite
            return self._read[id(task)][1]


def _refuse_long(suite: Suite | None, output_kb: int) -> None:
    for number, test in enumerate(suite.tests if suite else [], 1):
        if isinstance(test, FunctionTest | ProgramTest) and test.size > output_kb << 10:
            raise ValueError(
                f"test {number} of column `tests` expects {test.size} bytes, and `output_kb` allows {output_kb} KiB; "
                "set it higher or leave the test out"
            )


def shared_sandbox(config: CodeReward, resources: RewardResources) -> Sandbox:
    """Return the sandbox shared by all rewards of a manager with the same settings."""
    packages, jobs, backend = tuple(sorted(config.packages)), config.jobs, config.sandbox
    if backend == "plain":
        _log.warning("the code reward has `sandbox: plain`: the model's code runs without any isolation")
    key = f"sandbox {backend} {jobs} {' '.join(packages)}"
    return resources.shared(key, lambda: ProgramSandbox(packages=packages, jobs=jobs, backend=backend))


def sandbox_limits(config: CodeReward) -> SandboxLimits:
    """Return the limits of one test."""
    return SandboxLimits(
        wall_s=config.time_limit_s,
        cpu_s=int(config.time_limit_s) + 1,
        memory_mb=config.memory_mb,
        output_bytes=config.output_kb << 10,
    )


def _user_comparer(name: str, time_limit_s: float, resources: RewardResources) -> FunctionComparer:
    function = import_object(name)
    if not callable(function):
        raise ConfigError(f"judge {name} is a {type(function).__name__}, not a function")
    return FunctionComparer(name, function, resources.threads, time_limit_s)
