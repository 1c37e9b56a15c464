"""Environments in this process: plain methods run in threads, async ones in the event loop."""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from collections.abc import Callable
from typing import Any

from rollmill.config.environments import EnvironmentSection
from rollmill.errors import EpisodeError, RollmillError, WorkflowError
from rollmill.rewards.function_threads import FunctionThreads, FunctionTimeoutError
from rollmill.rollout.environments.base import (
    EnvironmentTimeoutError,
    Observation,
    StepResult,
    validate_observation,
    validate_step,
)
from rollmill.rollout.environments.spec import make_environment
from rollmill.types import Task

_log = logging.getLogger(__name__)


class ThreadedEnvironment:
    """One environment. A method that is still running when its rollout ends closes the environment at its own end."""

    def __init__(self, section: EnvironmentSection, threads: FunctionThreads) -> None:
        self._section, self._threads = section, threads
        self._target: Any = None
        self._lock = threading.Lock()  # around the two flags
        self._busy = self._left = False

    async def make(self) -> None:
        """Make it, in a thread."""

        def make() -> None:
            self._target = make_environment(self._section)

        await self._call("__init__", make)

    async def reset(self, task: Task, seed: int) -> Observation:
        """Begin an episode. Raises EpisodeError, and WorkflowError where it returned no observation."""
        found = await self._call("reset", self._target.reset, task, seed)
        return self._checked(validate_observation, found, "reset")  # type: ignore[no-any-return]

    async def step(self, action: str) -> StepResult:
        """Act. Raises as `reset` does."""
        found = await self._call("step", self._target.step, action)
        return self._checked(validate_step, found, "step")  # type: ignore[no-any-return]

    async def close(self) -> None:
        """Free what it holds. What it raises is logged: the rollout is over."""
        with self._lock:
            self._left, busy = True, self._busy
        if busy or not hasattr(self._target, "close"):
            return
        try:
            await self._call("close", self._target.close)
        except EpisodeError as error:
            _log.warning("environment `%s`: %s", self._section.name, error)

    async def _call(self, name: str, method: Callable[..., Any], *arguments: Any) -> Any:
        limit, loop = self._section.time_limit_s, asyncio.get_running_loop()
        started = loop.time()
        try:
            if inspect.iscoroutinefunction(method):
                found = method(*arguments)
            else:
                work = method if name == "close" else lambda: self._alone(lambda: method(*arguments))
                found = await self._threads.call(f"{self._section.name}.{name}", work, limit)
            if inspect.isawaitable(found):
                task = asyncio.ensure_future(found)
                found = await _within(task, max(limit - (loop.time() - started), 0.0))
        except RollmillError:
            raise
        except FunctionTimeoutError:
            text = f"{name} took longer than environment.time_limit_s ({limit:g} s)"
            raise EnvironmentTimeoutError(f"{text}; raise it, correct the method, or set `processes`") from None
        except Exception as error:
            raise EpisodeError(f"{name} raised {type(error).__name__}: {error}") from error
        return found

    def _alone(self, function: Callable[[], Any]) -> Any:
        """Run in a thread; closes afterwards where the rollout has ended meanwhile."""
        with self._lock:
            self._busy = True
        try:
            return function()
        finally:
            with self._lock:
                self._busy, left = False, self._left
            if left and hasattr(self._target, "close"):
                found = self._target.close()
                if inspect.iscoroutine(found):
                    asyncio.run(found)

    def _checked(self, check: Callable[[Any, str], Any], found: Any, name: str) -> Any:
        try:
            return check(found, f"{type(self._target).__name__}.{name}")
        except TypeError as error:
            raise WorkflowError(str(error)) from None


async def _within(task: asyncio.Future[Any], seconds: float) -> Any:
    """The result of a task; raises FunctionTimeoutError where it does not come in time, and ends it then."""
    try:
        await asyncio.wait({task}, timeout=seconds)
        if not task.done():
            raise FunctionTimeoutError
        return task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=1.0)
