"""Generates tests from a run's successes by Kimi k1.5's rules (arXiv:2501.12599); later successes have to pass them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, PrivateAttr, model_validator

from rollmill.config.operators import RewardOperatorSection, reject_weighting_keys
from rollmill.config.rewards import Reward
from rollmill.pipelines.batch import Batch, is_success
from rollmill.pipelines.builtin.deduplication import LRUCache
from rollmill.pipelines.builtin.verification import is_undecided, score_group
from rollmill.pipelines.reward_updates import init_reward_part, set_reward
from rollmill.rewards.builtin.code import CodeReward
from rollmill.types import Experience, Task

if TYPE_CHECKING:
    from rollmill.pipelines.pipeline import PipelineResources
    from rollmill.program_sandbox import ProgramSandbox
    from rollmill.rewards import RewardManager


@dataclass(slots=True)
class _TaskTests:
    """Distinct successes of a task, and its generated tests; None: not generated yet, []: none were sound."""

    programs: list[str] = field(default_factory=list)
    tests: list[dict[str, Any]] | None = None


class GeneratedTestsOperator(RewardOperatorSection):
    """Runs code that passed its tests on generated tests, too, once a task has enough solutions to generate them.

    Tasks with a column `generator` (a program that reads a number and prints a case) get tests by Kimi k1.5's rules
    from the run's own successes: a case is valid if enough of them agree, and the tests are used if enough of them pass
    all. A success that fails these tests earns `reward`.
    """

    name: Literal["test_cases"] = "test_cases"
    generator: str = "generator"
    """Column of the task with the program that generates cases."""
    threshold: float = 1.0
    """Minimum reward (or part) of a success."""
    reward: float = 0.0
    """Reward of a success that fails generated tests."""
    cases: int = Field(50, ge=1)
    """Number of cases to generate per task."""
    submissions: int = Field(10, ge=1)
    """Number of distinct successes of a task to collect before its tests are generated."""
    agree: int = Field(7, ge=1)
    """Minimum number of submissions that agree on a valid case."""
    solve: int = Field(9, ge=1)
    """Minimum number of submissions that pass all valid cases."""
    memory: int = Field(200, ge=1)
    """Number of tasks whose successes and tests are remembered; the least recently seen are dropped first."""
    code: CodeReward = CodeReward(name="code")
    """Execution and comparison of programs: a reward `code`."""
    _scorer: RewardManager = PrivateAttr()
    _sandbox: ProgramSandbox = PrivateAttr()
    _tests: LRUCache[_TaskTests] = PrivateAttr()

    @property
    def reward_lists(self) -> list[tuple[tuple[str | int, ...], list[Reward]]]:
        """The reward `code`."""
        return [(("code",), [self.code])]

    @model_validator(mode="after")
    def _enough(self) -> Self:
        reject_weighting_keys(self.code, "code", "tests are passed or failed")
        for key in ("agree", "solve"):
            if getattr(self, key) > self.submissions:
                raise ValueError(f"{key} ({getattr(self, key)}) is above submissions ({self.submissions}); lower it")
        return self

    def setup(self, resources: PipelineResources) -> None:
        from rollmill.program_sandbox import ProgramSandbox

        self._scorer = resources.build_reward_manager([self.code])
        packages = tuple(sorted(self.code.packages))
        self._sandbox = ProgramSandbox(packages=packages, jobs=self.code.jobs, backend=self.code.sandbox)
        self._tests = LRUCache(self.memory)

    async def __call__(self, batch: Batch) -> None:
        init_reward_part(batch)
        for group in batch.groups().values():
            task = batch.context.task(group[0].task_id)
            generator = task.metadata.get(self.generator)
            successes = [each for each in group if is_success(each, self.part, self.threshold)]
            if not isinstance(generator, str) or not successes:
                continue
            known = self._tests.get(task.id) or _TaskTests()
            self._tests.put(task.id, known)
            if known.tests is None:
                await self._collect(batch, task, generator, known, successes)
            if known.tests:
                await self._test(batch, task, known.tests, successes)

    async def _collect(
        self, batch: Batch, task: Task, generator: str, known: _TaskTests, successes: Sequence[Experience]
    ) -> None:
        """Record successes; generate the tests once there are enough."""
        from rollmill.rewards.code.extraction import extract_code, join_prefix
        from rollmill.rewards.code.generation import CodingProblem, ValidationCriteria, generate_tests

        name, prefix = _function_and_prefix(task)
        for experience in successes:
            code = extract_code(experience.parsed_reply.content, self.code.extract, name)
            source = None if code is None else join_prefix(prefix, code, name) if prefix else code
            if source is not None and source not in known.programs:
                known.programs.append(source)
        if len(known.programs) < self.submissions:
            return
        problem = CodingProblem(generator, known.programs, name)
        criteria = ValidationCriteria(self.cases, self.submissions, self.agree, self.solve)
        rules, limits = self.code.match_options(), self.code.sandbox_limits()
        known.tests, known.programs = [], []
        try:
            async with asyncio.timeout(batch.context.deadline_s / 2):  # slow programs must not end a run
                made = await generate_tests(problem, self._sandbox, criteria, rules, limits)
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
        results = await score_group(self._scorer, batch, successes, task=harder)
        for experience, result in zip(successes, results, strict=True):
            if result.reward is None or is_undecided(result, [self.code]):
                batch.note("not tested")
            elif result.reward < 1:
                set_reward(batch, experience, self.reward, "failed generated tests")
            else:
                batch.note("passed")

    def close(self) -> None:
        """Stop the processes of the sandbox and the rewards."""
        self._sandbox.close()
        self._scorer.close()

    def state_dict(self) -> dict[str, Any]:
        """Programs and tests of every task, least recently used first."""
        return {"tasks": [[task, known.programs, known.tests] for task, known in self._tests.items()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._tests = LRUCache(self.memory)
        for task, programs, tests in state["tasks"]:
            self._tests.put(task, _TaskTests(list(programs), tests))


def _function_and_prefix(task: Task) -> tuple[str | None, str]:
    """The function that a task requires (None: a program) and the text that the code continues."""
    from rollmill.rewards.code.tests import ProgramTest, read_suite

    suite = read_suite(task.metadata)
    if suite is None:
        return task.metadata.get("entry_point"), ""
    if isinstance(suite.tests[0], ProgramTest):
        return None, suite.prefix
    return task.metadata.get("entry_point") or suite.entry_point, suite.prefix
