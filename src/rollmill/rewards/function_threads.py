"""A bounded pool of threads for users' functions; a thread whose function does not return is abandoned."""

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
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_thread: threading.Thread | None = None

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

    async def run(self, name: str, coroutine: Coroutine[Any, Any, Any], time_limit_s: float) -> Any:
        """Return the result of a coroutine that runs in a separate event loop, independent of the training step.

        Raises RewardError (or the configured `error`) if a function blocks that loop for longer than `time_limit_s` and
        BLOCKED_S.
        """
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                thread = f"rollmill-{self._what}"
                self._loop_thread = threading.Thread(target=_serve_loop, args=(self._loop,), name=thread, daemon=True)
                self._loop_thread.start()
            ended: Future[None] = Future()
            loop = self._loop
            future = asyncio.run_coroutine_threadsafe(_signalling(coroutine, ended), loop)
        result = asyncio.wrap_future(future)
        result.add_done_callback(retrieve_error)
        try:
            while not (await asyncio.wait({result}, timeout=time_limit_s + _TURN_S))[0]:
                await self._require_turn(name, loop, max(time_limit_s, BLOCKED_S))
            return await result
        except asyncio.CancelledError:
            result.cancel()
            await asyncio.wait({asyncio.wrap_future(ended)}, timeout=1.0)  # let it clean up
            raise
        finally:
            result.cancel()

    async def _require_turn(self, name: str, loop: asyncio.AbstractEventLoop, within_s: float) -> None:
        """Raise the configured error unless the event loop of users' functions turns in time."""
        turned: Future[None] = Future()
        loop.call_soon_threadsafe(turned.set_result, None)
        for seconds in (within_s, _TURN_S):  # after this process was stopped, the loop has a moment, too
            await asyncio.wait({asyncio.wrap_future(turned)}, timeout=seconds)
            if turned.done():
                return
        place = _called_at(self._loop_thread)
        text = f"`{name}` got no answer: an async {self._what} blocks the event loop that all of them share"
        raise self._error(
            f"{text}, for more than {within_s:g} s{place}; await what takes long (asyncio.to_thread), or make the "
            "function a plain one"
        )

    def close(self) -> None:
        with self._lock:
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._loop = None
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


def _called_at(thread: threading.Thread | None) -> str:
    """Describe the line of users' code at which a thread is, or nothing."""
    frame = sys._current_frames().get(thread.ident) if thread is not None and thread.ident is not None else None
    while frame is not None:
        code = frame.f_code
        if user_code_frame(code.co_filename):
            return f", at {code.co_filename}:{frame.f_lineno} ({code.co_name})"
        frame = frame.f_back
    return ""


def _serve_loop(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
        for task in asyncio.all_tasks(loop):
            task.cancel()
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


# An event loop in a separate thread, independent of the training step.


class EventLoopThread:
    """Runs coroutines of any caller in one event loop; its thread starts with the first of them.

    `finish` is awaited there before the loop closes.
    """

    def __init__(self, name: str, finish: Callable[[], Coroutine[Any, Any, None]] | None = None) -> None:
        self._name, self._finish = name, finish
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Return the coroutine's result. If the caller is cancelled, so is the coroutine, and it may clean up first.

        Raises RewardError if the loop is closed meanwhile.
        """
        ended: Future[None] = Future()
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._serve, args=(self._loop,), name=self._name, daemon=True)
                self._thread.start()
            future = asyncio.run_coroutine_threadsafe(_signalling(coroutine, ended), self._loop)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            await asyncio.wait({asyncio.wrap_future(ended)}, timeout=1.0)
            caller = asyncio.current_task()
            if caller is None or caller.cancelling():
                raise
            raise RewardError("the judge was closed before its model replied") from None

    def close(self) -> None:
        """Cancel running coroutines and end the thread. May be called twice."""
        with self._lock:
            loop, thread = self._loop, self._thread
            self._loop = self._thread = None
        if loop is not None and thread is not None:
            loop.call_soon_threadsafe(loop.stop)
            if thread is not threading.current_thread():
                thread.join(timeout=5.0)

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


def start_user_task(work: Awaitable[Result]) -> asyncio.Task[Result]:
    """Start a task for a user's awaitable. One that calls sys.exit raises RuntimeError: SystemExit would end the event
    loop and leave every caller waiting."""
    task = asyncio.ensure_future(_without_exit(work))
    task.add_done_callback(retrieve_error)
    return task


def retrieve_error(task: asyncio.Future[Any]) -> None:
    """Retrieve the error of a task, which nobody does where the caller was cancelled: asyncio would log it."""
    if not task.cancelled():
        task.exception()


async def _without_exit(work: Awaitable[Result]) -> Result:
    try:
        return await work
    except SystemExit as error:
        raise RuntimeError(f"SystemExit: {error}") from error


async def gather_or_cancel(work: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Return the results in order; if one fails, cancel and await the others, then raise its error."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each) for each in work]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0]  # noqa: B904 (it has a cause of its own)
    return [task.result() for task in tasks]
