"""Checks of tasks that are graded in containers: what their own solutions earn, and an agent that does nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from rollmill.apps.audit.findings import Finding, Severity, finding_by_share, passed_check, skipped_check
from rollmill.errors import RollmillError
from rollmill.rewards import RewardManager
from rollmill.rewards.builtin.container import GradingSection, run_grading
from rollmill.rewards.grading import completion_from_text
from rollmill.rollout.containers.pool import ContainerPool
from rollmill.types import SEALED, Task

_NEAR = 1e-6


class ContainerAudit:
    """Runs solutions of tasks in containers, and no agent at all, each graded by the run's rewards.

    Args:
        full: the reward of a task that is solved.
    """

    def __init__(self, pool: ContainerPool, rewards: RewardManager, tasks: Sequence[Task], full: float) -> None:
        self._pool, self._rewards, self._tasks, self._full = pool, rewards, tasks, full

    async def run(self) -> list[Finding]:
        solved = [task for task in self._tasks if "solution" in task.metadata.get(SEALED, {})]
        jobs = [*((task, True) for task in solved), *((task, False) for task in self._tasks)]
        earned = await asyncio.gather(*(self._earned(task, solve) for task, solve in jobs))
        errors = {task.id: each for (task, _), each in zip(jobs, earned, strict=True) if isinstance(each, str)}
        found = {
            (task.id, solve): each
            for (task, solve), each in zip(jobs, earned, strict=True)
            if not isinstance(each, str)
        }
        failed = [id for (id, solve), reward in found.items() if solve and reward < self._full - _NEAR]
        idle = [id for (id, solve), reward in found.items() if not solve and reward >= self._full - _NEAR]
        return [self._oracle(failed, len(solved)), self._empty(idle), self._errors(errors)]

    def _oracle(self, failed: list[str], count: int) -> Finding:
        if not count:
            return skipped_check("container_oracle", "no task has a solution of its own")
        text = f"{count - len(failed)} of {count} solutions earn the full reward ({self._full:g})"
        advice = "correct their solutions or tests, or drop these tasks: no agent can solve them as they are graded"
        return finding_by_share("container_oracle", len(failed) / count, 0.0, text, advice, failed)

    def _empty(self, idle: list[str]) -> Finding:
        count = len(self._tasks)
        text = f"an agent that does nothing earns the full reward in {len(idle)} of {count} tasks"
        advice = "correct their tests, which pass before anything is done, or drop these tasks"
        return finding_by_share("container_empty", len(idle) / max(count, 1), 0.0, text, advice, idle)

    def _errors(self, errors: dict[str, str]) -> Finding:
        if not errors:
            return passed_check("container_errors", "all containers start, and all commands that grade run")
        text = f"{len(errors)} tasks cannot be graded; the first: {next(iter(errors.values()))}"
        return Finding("container_errors", Severity.PROBLEM, text, "correct their images and tests", list(errors))

    async def _earned(self, task: Task, solve: bool) -> float | str:
        """The reward with the task's solution, or without anything done; the error if it cannot be known."""
        rollout: Any = SimpleNamespace(task=task)
        try:
            async with self._pool.one(rollout) as container:
                if solve:
                    solution = GradingSection.model_validate(task.metadata[SEALED]["solution"])
                    await run_grading(solution.model_copy(update={"end_processes": False}), container)
                result = await self._rewards.score(task, completion_from_text(task, ""), container=container)
                return 0.0 if result.reward is None else result.reward
        except RollmillError as error:
            return str(error)
