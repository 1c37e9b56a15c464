"""Environments of rollouts, one each, in threads or worker processes, with a time limit for every call."""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from rollmill.concurrency import FunctionThreads, FunctionTimeoutError, within
from rollmill.config.environments import EnvironmentSection
from rollmill.errors import ConfigError, EpisodeError, RollmillError, WorkflowError
from rollmill.rollout.environments.base import (
    EnvironmentCrashError,
    EnvironmentTimeoutError,
    Observation,
    StepResult,
    make_environment,
    validate_observation,
    validate_step,
)
from rollmill.rollout.environments.worker_pool import EnvironmentWorker, EnvironmentWorkerPool
from rollmill.rollout.workflow import Rollout
from rollmill.types import Task

Result = TypeVar("Result")

MAX_ENVIRONMENT_THREADS = 64
"""Maximum number of concurrent blocking calls of environments in this process."""

_log = logging.getLogger(__name__)


class ThreadedEnvironment:
    """An environment in this process: plain methods run in threads, async ones in the event loop.

    A method that is still running when its rollout ends closes the environment when it returns.
    """

    def __init__(self, section: EnvironmentSection, threads: FunctionThreads) -> None:
        self._section, self._threads = section, threads
        self._target: Any = None
        self._lock = threading.Lock()  # around the two flags
        self._busy = self._left = False

    async def make(self) -> None:
        """Create the environment in a thread."""

        def make() -> None:
            self._target = make_environment(self._section)

        await self._call("__init__", make)

    async def reset(self, task: Task, seed: int) -> Observation:
        """Start an episode. Raises EpisodeError, and WorkflowError if no observation is returned."""
        found = await self._call("reset", self._target.reset, task, seed)
        return self._checked(validate_observation, found, "reset")  # type: ignore[no-any-return]

    async def step(self, action: str) -> StepResult:
        """Perform an action. Raises as `reset` does."""
        found = await self._call("step", self._target.step, action)
        return self._checked(validate_step, found, "step")  # type: ignore[no-any-return]

    async def close(self) -> None:
        """Close the environment. Its errors are logged: the rollout is over."""
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
                found = await within(found, max(limit - (loop.time() - started), 0.0))
        except RollmillError:
            raise
        except FunctionTimeoutError:
            text = f"{name} took longer than environment.time_limit_s ({limit:g} s)"
            raise EnvironmentTimeoutError(f"{text}; raise it, correct the method, or set `processes`") from None
        except Exception as error:
            raise EpisodeError(f"{name} raised {type(error).__name__}: {error}") from error
        return found

    def _alone(self, function: Callable[[], Any]) -> Any:
        """Run in a thread; then close the environment if the rollout has ended."""
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


@dataclass(slots=True)
class EnvironmentStats:
    """Counts over all environments of a stage."""

    resets: int = 0
    steps: int = 0
    crashes: int = 0  #: exceptions and ended processes
    timeouts: int = 0
    seconds: float = 0.0  #: total seconds of steps


class _EnvironmentBackend(Protocol):
    """Implementation of one environment, in a thread or a worker process."""

    async def make(self) -> None: ...

    async def reset(self, task: Task, seed: int) -> Observation: ...

    async def step(self, action: str) -> StepResult: ...

    async def close(self) -> None: ...


class EnvironmentPool:
    """Creates environments, one per rollout, in threads of this process or in worker processes.

    Raises ConfigError if worker processes cannot import the class.
    """

    def __init__(self, section: EnvironmentSection) -> None:
        self._section = section
        self.workers = EnvironmentWorkerPool(section) if section.processes else None
        self._threads = FunctionThreads(
            "environment", EpisodeError, MAX_ENVIRONMENT_THREADS, most_stuck=MAX_ENVIRONMENT_THREADS
        )
        self._counts, self._reported = EnvironmentStats(), EnvironmentStats()
        self._restarts_reported = 0

    @asynccontextmanager
    async def one(self, rollout: Rollout) -> AsyncIterator[RunningEnvironment]:
        """Create an environment for one rollout, and close it at the end."""
        home: _EnvironmentBackend
        if self.workers is None:
            home = ThreadedEnvironment(self._section, self._threads)
        else:
            home = WorkerEnvironment(self.workers, *self.workers.place())
        running = RunningEnvironment(self._section.name, home, rollout, self._counts)
        try:
            await running.make()
            yield running
        finally:
            await home.close()

    def metrics(self) -> dict[str, float]:
        """Metrics since the last call."""
        now, before = self._counts, self._reported
        steps = now.steps - before.steps
        found: dict[str, float] = {
            "environment/resets": now.resets - before.resets,
            "environment/steps": steps,
            "environment/crashes": now.crashes - before.crashes,
            "environment/timeouts": now.timeouts - before.timeouts,
            "environment/step_seconds": (now.seconds - before.seconds) / max(steps, 1),
        }
        self._reported = EnvironmentStats(now.resets, now.steps, now.crashes, now.timeouts, now.seconds)
        if self.workers is not None:
            found["environment/restarts"] = self.workers.restarts - self._restarts_reported
            self._restarts_reported = self.workers.restarts
        return found

    async def close(self) -> None:
        """Stop processes and threads; may be called twice."""
        if self.workers is not None:
            self.workers.close()
        self._threads.close()


class RunningEnvironment:
    """The environment of one rollout, as workflows see it."""

    def __init__(self, name: str, home: _EnvironmentBackend, rollout: Rollout, counts: EnvironmentStats) -> None:
        self._name, self._home, self._rollout, self._counts = name, home, rollout, counts
        self._task = rollout.task

    async def make(self) -> None:
        """Create the environment; raises as `reset` does."""
        await self._contained(self._home.make)

    async def reset(self, task: Task | None = None, seed: int | None = None) -> Observation:
        """Start an episode of the rollout's task or another one; return the first observation.

        Args:
            seed: None: the same for all rollouts of a group, which are compared with each other.

        Raises:
            EpisodeError: it raised, crashed or took too long.
            WorkflowError: it returned no valid observation.
        """
        self._task = task or self._rollout.task
        number = self._rollout.group_seed if seed is None else seed
        self._counts.resets += 1
        return await self._contained(lambda: self._home.reset(self._task, number))

    async def step(self, action: str) -> StepResult:
        """Perform an action. Raises as `reset` does."""
        started = time.perf_counter()
        self._counts.steps += 1
        try:
            return await self._contained(lambda: self._home.step(action))
        finally:
            self._counts.seconds += time.perf_counter() - started

    async def _contained(self, call: Callable[[], Awaitable[Result]]) -> Result:
        try:
            return await call()
        except ConfigError:
            raise
        except WorkflowError as error:
            self._counts.timeouts += isinstance(error, EnvironmentTimeoutError)
            self._counts.crashes += isinstance(error, EpisodeError) and not isinstance(error, EnvironmentTimeoutError)
            wrapped = type(error)(f"environment `{self._name}` failed on task `{self._task.id}`: {error}")
            raise wrapped from error.__cause__


class WorkerEnvironment:
    """An environment in a worker process."""

    def __init__(self, pool: EnvironmentWorkerPool, worker: EnvironmentWorker, number: int) -> None:
        self._pool, self._worker, self._number = pool, worker, number

    async def make(self) -> None:
        await self._call("make", self._pool.recipe)

    async def reset(self, task: Task, seed: int) -> Observation:
        found: Observation = await self._call("reset", task, seed)
        return found

    async def step(self, action: str) -> StepResult:
        return StepResult(*await self._call("step", action))

    async def close(self) -> None:
        left = self._worker.leave(self._number)
        if left is not None:
            left.add_done_callback(self._log_close_error)

    def _log_close_error(self, closed: Future[Any]) -> None:
        """Log an error of the environment's own `close`: the rollout is over."""
        error = None if closed.cancelled() else closed.exception()
        if error is not None and not isinstance(error, EnvironmentCrashError):
            _log.warning("environment `%s`: %s", self._pool.name, error)

    async def _call(self, kind: str, *arguments: Any) -> Any:
        return await asyncio.wrap_future(self._worker.submit(kind, self._number, *arguments))
