"""From the section `environment` to environments."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from rollmill.config.environments import EnvironmentSection
from rollmill.core.types import Task
from rollmill.explorer.environments.base import Environment, StepResult
from rollmill.explorer.workflow import Rollout


class EnvironmentPool:
    """Makes environments, one per rollout."""

    def __init__(self, section: EnvironmentSection) -> None:
        self._section = section

    @asynccontextmanager
    async def one(self, rollout: Rollout) -> AsyncIterator[Environment]:
        """An environment for one rollout."""
        environment = InProcess(make_environment(self._section))
        try:
            yield environment
        finally:
            await environment.close()

    async def close(self) -> None:
        """End processes; may be called twice."""


class InProcess:
    """An object of a user's or library's class as an Environment; its methods may be plain or async."""

    def __init__(self, target: Any) -> None:
        self._target = target

    async def reset(self, task: Task, seed: int) -> str:
        """See Environment."""
        return str(await _result(self._target.reset(task, seed)))

    async def step(self, action: str) -> StepResult:
        """See Environment."""
        found: StepResult = await _result(self._target.step(action))
        return found

    async def close(self) -> None:
        """See Environment."""
        if hasattr(self._target, "close"):
            await _result(self._target.close())


async def _result(found: Any) -> Any:
    return await found if inspect.isawaitable(found) else found


def make_environment(section: EnvironmentSection) -> Any:
    """An object with reset, step and perhaps close."""
    target = type(section).function
    if target is not None:
        return target(**section.arguments())
    raise AssertionError(f"no environment is built from {type(section).__name__}")
