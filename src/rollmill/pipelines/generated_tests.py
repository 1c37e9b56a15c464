"""Generates tests from a run's successes by Kimi k1.5's rules (arXiv:2501.12599); later successes have to pass them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rollmill.config.operators.synthesis import GeneratedTestsOperator
from rollmill.pipelines.batch import Batch, is_success
from rollmill.pipelines.deduplication import LRUCache
from rollmill.pipelines.pipeline import PipelineResources
from rollmill.pipelines.reward_updates import init_reward_part, set_reward
from rollmill.pipelines.verification import is_undecided, score_group
from rollmill.program_sandbox import ProgramSandbox
from rollmill.rewards.code.extraction import extract_code, join_prefix
from rollmill.rewards.code.generation import CodingProblem, ValidationCriteria, generate_tests
from rollmill.rewards.code.tests import ProgramTest, read_suite
from rollmill.types import Experience, Task


@dataclass(slots=True)
class _TaskTests:
    """Distinct successes of a task, and its generated tests; None: not generated yet, []: none were sound."""

    programs: list[str] = field(default_factory=list)
    tests: list[dict[str, Any]] | None = None


class TestGenerator:
    """Collects successes of tasks that have a generator, generates tests once, and tests later successes."""

    def __init__(self, options: GeneratedTestsOperator, resources: PipelineResources) -> None:
        code = options.code
        self._options, self._rewards = options, resources.build_reward_manager([code])
        self._sandbox = ProgramSandbox(packages=tuple(sorted(code.packages)), jobs=code.jobs, backend=code.sandbox)
        self._criteria = ValidationCriteria(options.cases, options.submissions, options.agree, options.solve)
        self._memory: LRUCache[_TaskTests] = LRUCache(options.memory)

    async def __call__(self, batch: Batch) -> None:
        init_reward_part(batch)
        for group in batch.groups().values():
            task = batch.context.task(group[0].task_id)
            generator = task.metadata.get(self._options.generator)
            successes = [each for each in group if is_success(each, self._options.part, self._options.threshold)]
            if not isinstance(generator, str) or not successes:
                continue
            known = self._memory.get(task.id) or _TaskTests()
            self._memory.put(task.id, known)
            if known.tests is None:
                await self._collect(batch, task, generator, known, successes)
            if known.tests:
                await self._test(batch, task, known.tests, successes)

    async def _collect(
        self, batch: Batch, task: Task, generator: str, known: _TaskTests, successes: Sequence[Experience]
    ) -> None:
        """Record successes; generate the tests once there are enough."""
        name, prefix = _function_and_prefix(task)
        for experience in successes:
            code = extract_code(experience.parsed_reply.content, self._options.code.extract, name)
            source = None if code is None else join_prefix(prefix, code, name) if prefix else code
            if source is not None and source not in known.programs:
                known.programs.append(source)
        if len(known.programs) < self._options.submissions:
            return
        problem = CodingProblem(generator, known.programs, name)
        code_options = self._options.code
        rules, limits = code_options.match_options(), code_options.sandbox_limits()
        known.tests, known.programs = [], []
        try:
            async with asyncio.timeout(batch.context.deadline_s / 2):  # slow programs must not end a run
                made = await generate_tests(problem, self._sandbox, self._criteria, rules, limits)
        except TimeoutError:
            batch.note("tests too slow")
            return
        known.tests = made.tests
        batch.note("tests made" if made.tests else "no sound tests")

    async def _test(
        self, batch: Batch, task: Task, tests: list[dict[str, Any]], successes: Sequence[Experience]
    ) -> None:
        columns = {key: value for key, value in task.metadata.items() if key in ("entry_point", "prefix", "checker")}
        harder = replace(task, metadata=columns | {"tests": tests})
        results = await score_group(self._rewards, batch, successes, task=harder)
        for experience, result in zip(successes, results, strict=True):
            if result.reward is None or is_undecided(result, [self._options.code]):
                batch.note("not tested")
            elif result.reward < 1:
                set_reward(batch, experience, self._options.reward, "failed generated tests")
            else:
                batch.note("passed")

    def close(self) -> None:
        """Stop the processes of the sandbox and the rewards."""
        self._sandbox.close()
        self._rewards.close()

    def state_dict(self) -> dict[str, Any]:
        """Programs and tests of every task, least recently used first."""
        return {"tasks": [[task, known.programs, known.tests] for task, known in self._memory.items()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._memory = LRUCache(self._options.memory)
        for task, programs, tests in state["tasks"]:
            self._memory.put(task, _TaskTests(list(programs), tests))


def _function_and_prefix(task: Task) -> tuple[str | None, str]:
    """The function that a task requires (None: a program) and the text that the code continues."""
    suite = read_suite(task.metadata)
    if suite is None:
        return task.metadata.get("entry_point"), ""
    if isinstance(suite.tests[0], ProgramTest):
        return None, suite.prefix
    return task.metadata.get("entry_point") or suite.entry_point, suite.prefix
