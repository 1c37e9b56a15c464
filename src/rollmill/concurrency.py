"""Users' functions in threads and in an event loop of their own, so that one that blocks or hangs holds up nothing.

A thread cannot be ended: one whose function does not return is abandoned. A process can
(`rollmill_grading.worker_process`).
"""

from __future__ import annotations

import asyncio
import logging
import queue
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from rollmill.errors import RewardError, RollmillError, user_code_frame

Result = TypeVar("Result")

MAX_THREADS = 16
"""Calls that run at the same time."""
MAX_STUCK_THREADS = 8
"""Threads that may be stuck past their time limit before the run fails."""

_TURN_S = 1.0
BLOCKED_S = 5.0
"""An event loop that does not turn for so long, and for longer than the function's time limit, is blocked."""

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _FunctionCall:
    name: str
    function: Callable[[], Any]
    started: Future[None] = field(default_factory=Future)
    done: Future[tuple[Any, BaseException | None]] = field(default_factory=Future)


class FunctionTimeoutError(Exception):
    """A function did not return within its time limit."""


class FunctionThreads:
    """Runs plain functions in daemon threads, so that one that never returns cannot keep the process alive.

    Args:
        what: the kind of function, for messages.
        error: raised when too many of them never return.
        limit: number of functions that run at once.
        most_stuck: number of threads that may be stuck past their time limit; beyond it calls are refused.
    """

    def __init__(
        self,
        what: str = "reward",
        error: type[RollmillError] = RewardError,
        limit: int = MAX_THREADS,
        most_stuck: int = MAX_STUCK_THREADS,
    ) -> None:
        self._what, self._error, self._limit, self._most_stuck = what, error, limit, most_stuck
        self._calls: queue.SimpleQueue[_FunctionCall | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._running = 0  # threads in service: idle or busy within their limit
        self._idle = 0  # idle threads minus calls that wait for one
        self._stuck: set[_FunctionCall] = set()
        self._loop = EventLoopThread(f"rollmill-{what}", closed=f"the {what} functions were closed before it answered")

    async def call(self, name: str, function: Callable[[], Any], time_limit_s: float) -> Any:
        """Return `function()`, or raise its exception. The time limit counts from its start.

        Raises:
            FunctionTimeoutError: it did not return within `time_limit_s`; its thread is abandoned.
            RewardError: too many threads are abandoned (or the configured `error`).
        """
        self._refuse_if_stuck(f"`{name}` is not called")
        call = _FunctionCall(name, function)
        self._enqueue(call)
        try:
            await asyncio.wrap_future(call.started)
            done = asyncio.wrap_future(call.done)
            await asyncio.wait({done}, timeout=time_limit_s)
        except asyncio.CancelledError:  # no caller is left, but its thread may never return
            asyncio.get_running_loop().call_later(time_limit_s, self._abandon, call, time_limit_s)
            raise
        if not done.done():
            done.cancel()
            self._abandon(call, time_limit_s)
            self._refuse_if_stuck(f"`{name}` did not return within {time_limit_s:g} s")
            raise FunctionTimeoutError
        value, error = done.result()
        if error is not None:
            if isinstance(error, Exception):
                raise error
            raise RuntimeError(f"{type(error).__name__}: {error}") from error
        return value

    async def run(self, name: str, work: Awaitable[Any], time_limit_s: float) -> Any:
        """Return the result of an awaitable in an event loop of its own, which does not stand still in a training step.

        Raises:
            FunctionTimeoutError: it took longer than `time_limit_s`, and was cancelled.
            RewardError: a function blocks that loop for longer than `time_limit_s` and BLOCKED_S (or the configured
                `error`).
        """

        async def require_turn() -> None:
            within_s = max(time_limit_s, BLOCKED_S)
            if not await self._loop.turns(within_s):
                text = f"`{name}` got no answer: an async {self._what} blocks the event loop that all of them share"
                raise self._error(
                    f"{text}, for more than {within_s:g} s{self._loop.place()}; await what takes long "
                    "(asyncio.to_thread), or make the function a plain one"
                )

        return await self._loop.run(within(work, time_limit_s), require_turn, time_limit_s + _TURN_S)

    def close(self) -> None:
        """End the threads that are not stuck. May be called twice."""
        self._loop.close(0.0)  # a function may block it
        with self._lock:
            for _ in range(self._running):
                self._calls.put(None)
            self._running = self._idle = 0

    def _enqueue(self, call: _FunctionCall) -> None:
        with self._lock:
            self._idle -= 1
            if self._idle < 0 and self._running < self._limit:
                self._start_thread()
        self._calls.put(call)

    def _start_thread(self) -> None:
        self._running += 1
        self._idle += 1
        threading.Thread(target=self._serve, name=f"rollmill-{self._what}", daemon=True).start()

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            if call.started.set_running_or_notify_cancel():
                call.done.set_running_or_notify_cancel()
                call.started.set_result(None)
                try:
                    result: tuple[Any, BaseException | None] = call.function(), None
                except BaseException as error:
                    result = None, error
                call.done.set_result(result)
            with self._lock:
                if call in self._stuck:
                    self._stuck.discard(call)
                    return
                self._idle += 1

    def _abandon(self, call: _FunctionCall, time_limit_s: float) -> None:
        with self._lock:
            if not call.done.running() or call in self._stuck:
                return
            self._stuck.add(call)
            self._running -= 1
            if self._idle < 0:
                self._start_thread()
            stuck = len(self._stuck)
        if stuck & (stuck - 1) == 0:  # 1, 2, 4, ...: limits the warnings about a function that always hangs
            text = "%s `%s` did not return within %g s; its thread cannot be ended (%d are stuck)"
            _log.warning(text, self._what, call.name, time_limit_s, stuck)

    def _refuse_if_stuck(self, text: str) -> None:
        with self._lock:
            names = sorted({each.name for each in self._stuck})
            stuck = len(self._stuck)
        if stuck > self._most_stuck:
            reason = f"{stuck} threads are stuck in {', '.join(f'`{name}`' for name in names)} and cannot be ended"
            raise self._error(f"{text}: {reason}; make the function stop by itself, or make it async")


class EventLoopThread:
    """Runs coroutines of any caller in one event loop; its thread starts with the first of them.

    Args:
        finish: awaited there before the loop closes.
        closed: text of the error for callers that still wait when it is closed.
    """

    def __init__(
        self,
        name: str,
        finish: Callable[[], Coroutine[Any, Any, None]] | None = None,
        closed: str = "the judge was closed before its model replied",
    ) -> None:
        self._name, self._finish, self._closed = name, finish, closed
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def run(
        self,
        coroutine: Coroutine[Any, Any, Result],
        check: Callable[[], Awaitable[None]] | None = None,
        every_s: float | None = None,
    ) -> Result:
        """Return the coroutine's result. If the caller is cancelled, so is the coroutine, and it may clean up first.

        Args:
            check: awaited every `every_s` seconds meanwhile; what it raises is raised here.

        Raises RewardError if the loop is closed meanwhile.
        """
        ended: Future[None] = Future()
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._serve, args=(self._loop,), name=self._name, daemon=True)
                self._thread.start()
            future = asyncio.run_coroutine_threadsafe(_signalling(coroutine, ended), self._loop)
        result = asyncio.wrap_future(future)
        result.add_done_callback(retrieve_error)
        try:
            while check is not None and not (await asyncio.wait({result}, timeout=every_s))[0]:
                await check()
            return await result
        except asyncio.CancelledError:
            result.cancel()
            await asyncio.wait({asyncio.wrap_future(ended)}, timeout=1.0)
            caller = asyncio.current_task()
            if caller is None or caller.cancelling():
                raise
            raise RewardError(self._closed) from None
        finally:
            result.cancel()

    async def turns(self, within_s: float) -> bool:
        """True unless a coroutine blocks the loop for that long."""
        turned: Future[None] = Future()
        with self._lock:
            if self._loop is None:
                return True
            self._loop.call_soon_threadsafe(turned.set_result, None)
        for seconds in (within_s, _TURN_S):  # after this process was stopped, the loop has a moment, too
            await asyncio.wait({asyncio.wrap_future(turned)}, timeout=seconds)
            if turned.done():
                return True
        return False

    def place(self) -> str:
        """Describe the line of users' code at which the thread is, or nothing."""
        thread = self._thread
        frame = sys._current_frames().get(thread.ident) if thread is not None and thread.ident is not None else None
        while frame is not None:
            if user_code_frame(frame.f_code.co_filename):
                return f", at {frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})"
            frame = frame.f_back
        return ""

    def close(self, wait_s: float = 5.0) -> None:
        """Cancel running coroutines and end the thread. May be called twice."""
        with self._lock:
            loop, thread = self._loop, self._thread
            self._loop = self._thread = None
        if loop is not None and thread is not None:
            loop.call_soon_threadsafe(loop.stop)
            if thread is not threading.current_thread():
                thread.join(timeout=wait_s)

    def _serve(self, loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
            pending = asyncio.all_tasks(loop)
            for task in pending:
                task.cancel()
            loop.run_until_complete(asyncio.gather(*pending, return_exceptions=True))
            if self._finish is not None:
                loop.run_until_complete(self._finish())
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            loop.close()


async def _signalling(coroutine: Coroutine[Any, Any, Result], ended: Future[None]) -> Result:
    task = asyncio.current_task()
    assert task is not None
    task.add_done_callback(retrieve_error)
    try:
        return await coroutine
    finally:
        ended.set_result(None)


async def within(work: Awaitable[Result], seconds: float) -> Result:
    """Return the result of a user's awaitable; cancel it and raise FunctionTimeoutError if it takes too long.

    One that calls sys.exit or cancels itself raises RuntimeError: SystemExit would end the event loop and leave every
    caller waiting.
    """

    async def without_exit() -> Result:
        try:
            return await work
        except SystemExit as error:
            raise RuntimeError(f"SystemExit: {error}") from error

    task = asyncio.ensure_future(without_exit())
    task.add_done_callback(retrieve_error)
    try:
        await asyncio.wait({task}, timeout=seconds)
        if not task.done():
            raise FunctionTimeoutError
        if task.cancelled():
            raise RuntimeError("it cancelled itself")
        return task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=1.0)


def retrieve_error(task: asyncio.Future[Any]) -> None:
    """Retrieve the error of a task, which nobody does where the caller was cancelled: asyncio would log it."""
    if not task.cancelled():
        task.exception()


async def gather_or_cancel(work: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Return the results in order; if one fails, cancel and await the others, then raise its error."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each) for each in work]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0]  # noqa: B904 (it has a cause of its own)
    return [task.result() for task in tasks]
