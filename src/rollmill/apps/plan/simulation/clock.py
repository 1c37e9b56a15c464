"""Virtual time: an event loop whose clock jumps to its next timer, and the simulated processes that share it.

Nothing here depends on the machine's clock, on addresses of objects or on threads, so one seed gives one history.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from typing import Any, TypeVar

from rollmill.waiting import OUTAGES, OutageLog

Result = TypeVar("Result")

EPOCH = 1_700_000_000.0
"""Virtual time 0, in seconds since the epoch."""
_RESOLUTION_S = 1e-6
_KILL_S = 1e-3
_OUTSIDE = -1.0
_MAX_TURNS = 2_000


class SimulationStuckError(Exception):
    """Nothing can happen any more: every task waits for another one."""


class ProcessKilled(BaseException):
    """Raised inside a simulated process that was killed, where it touches the world outside."""


class _NumberedFuture(asyncio.Future[Any]):
    """A future that sets order by its number and not by its address."""

    def __init__(self, number: int, **options: Any) -> None:
        super().__init__(**options)
        self._number = number

    def __hash__(self) -> int:
        return self._number


class _NumberedTask(asyncio.Task[Any]):
    """A task that sets order by its number and not by its address."""

    def __init__(self, number: int, work: Coroutine[Any, Any, Any], **options: Any) -> None:
        self._number = number
        super().__init__(work, **options)

    def __hash__(self) -> int:
        return self._number


class _NextTimer:
    """A selector without files: its wait advances the clock."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    def select(self, timeout: float | None) -> list[Any]:
        """Raises SimulationStuckError where a real loop would wait forever."""
        if timeout is None:
            raise SimulationStuckError(f"nothing is left to happen after {self._loop.time():.3f} s")
        self._loop.advance(timeout)
        return []


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop on virtual time, in seconds from 0. Functions for threads run at once and take the time they
    spend."""

    def __init__(self) -> None:
        self._now, self._thread_s = 0.0, _OUTSIDE
        self._numbers = itertools.count()
        super().__init__()
        self._selector = _NextTimer(self)
        self._clock_resolution = _RESOLUTION_S
        self._turned, self._turns = 0.0, 0  # turns since time has passed
        self.watchers: list[Callable[[], None]] = []  #: called after every turn; may raise
        self.set_task_factory(_make_task)
        self.set_exception_handler(lambda loop, context: None)  # tasks of killed processes end with errors

    def _run_once(self) -> None:
        super()._run_once()  # type: ignore[misc]
        self._turns = 0 if self._now > self._turned else self._turns + 1
        self._turned = self._now
        if self._turns > _MAX_TURNS:
            self._turns = 0
            raise SimulationStuckError(f"no time passes any more after {self._now:.3f} s")
        for watcher in self.watchers:
            watcher()

    def time(self) -> float:
        return self._now

    def clock(self) -> float:
        """Virtual seconds as the running code sees them, in a thread as well."""
        return self._now + max(self._thread_s, 0.0)

    def advance(self, seconds: float) -> None:
        """Let time pass while nothing happens."""
        self._now += seconds

    def spend(self, seconds: float) -> None:
        """Take time without giving way: in the loop everything waits, in a thread only its own future does."""
        if self._thread_s >= 0:
            self._thread_s += seconds
        else:
            self._now += seconds

    def create_future(self) -> asyncio.Future[Any]:
        return _NumberedFuture(self.next_number(), loop=self)

    def next_number(self) -> int:
        """A number for the next task or future."""
        return next(self._numbers)

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., Result], *args: Any
    ) -> asyncio.Future[Result]:
        """Runs the function now; its future ends when its virtual time is over."""
        future = self.create_future()
        before, self._thread_s = self._thread_s, 0.0
        result, error = None, None
        try:
            result = func(*args)
        except Exception as raised:
            error = raised
        seconds, self._thread_s = self._thread_s, before

        def end() -> None:
            if not future.done():
                future.set_exception(error) if error is not None else future.set_result(result)

        self.call_later(seconds, end)
        process = CURRENT.get()
        if process is not None:
            process.threads.append(future)
        return future

    def _process_events(self, event_list: list[Any]) -> None:
        """No files, no events."""

    def _write_to_self(self) -> None:
        """Nobody else wakes this loop."""


def _make_task(loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
    assert isinstance(loop, VirtualLoop)
    task = _NumberedTask(loop.next_number(), work, loop=loop, **options)
    process = CURRENT.get()
    if process is not None:
        process.adopt(task)
    return task


class SimulatedProcess:
    """Everything that runs in one process: its tasks end when it is killed, without doing anything outside any more.

    Args:
        skew: seconds by which its wall clock differs.
    """

    def __init__(self, loop: VirtualLoop, name: str, *, skew: float = 0.0) -> None:
        self.loop, self.name, self.skew = loop, name, skew
        self.alive = True
        self.slowness = 1.0  #: factor of the seconds that its work takes
        self.outages = OutageLog(loop.time)
        self.threads: list[asyncio.Future[Any]] = []
        self._tasks: dict[asyncio.Task[Any], None] = {}

    def spawn(self, work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
        """Start a task in this process."""
        context = copy_context()
        context.run(CURRENT.set, self)
        return context.run(self.loop.create_task, work)

    def adopt(self, task: asyncio.Task[Any]) -> None:
        """Count a task as one of this process."""
        self._tasks[task] = None
        task.add_done_callback(lambda done: self._tasks.pop(done, None))

    def require_alive(self) -> None:
        """Raise ProcessKilled after the end of the process."""
        if not self.alive:
            raise ProcessKilled(self.name)

    async def kill(self) -> None:
        """End the process as SIGKILL does, and wait until nothing of it is left."""
        self.alive = False
        for future in self.threads:
            if not future.done():
                future.set_exception(ProcessKilled(self.name))
        while self._tasks:
            for task in list(self._tasks):
                task.cancel()
            await asyncio.sleep(_KILL_S)


CURRENT: ContextVar[SimulatedProcess | None] = ContextVar("CURRENT", default=None)
"""The simulated process that runs."""


@contextmanager
def virtual_time() -> Iterator[VirtualLoop]:
    """Make a virtual loop; inside, the functions of `time` and the outages of waits follow it."""
    loop = VirtualLoop()

    def wall() -> float:
        process = CURRENT.get()
        return EPOCH + loop.clock() + (0.0 if process is None else process.skew)

    outages = dict(vars(OUTAGES))
    vars(OUTAGES).update(vars(OutageLog(loop.time)))
    functions = {"time": wall, "monotonic": loop.clock, "perf_counter": loop.clock, "sleep": loop.spend}
    real = {name: getattr(time, name) for name in functions}
    asyncio.set_event_loop(loop)
    vars(time).update(functions)
    try:
        yield loop
        _cancel_all(loop)
    finally:
        vars(time).update(real)
        vars(OUTAGES).update(outages)
        asyncio.set_event_loop(None)
        loop.close()


def _cancel_all(loop: VirtualLoop) -> None:
    async def cancelled() -> None:
        mine = asyncio.current_task()
        for _ in range(1000):
            left = [task for task in asyncio.all_tasks() if task is not mine]
            if not left:
                return
            for task in left:
                task.cancel()
            await asyncio.sleep(_KILL_S)

    loop.run_until_complete(cancelled())
    loop.run_until_complete(loop.shutdown_asyncgens())
