"""Calls of users' reward functions: in this thread while they are quick, in processes, in threads, in an event loop.

Worker processes import this module, so it imports little.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from functools import partial
from types import FrameType
from typing import Any

from rollmill.concurrency import FunctionThreads, FunctionTimeoutError
from rollmill.errors import RewardError, user_code_location
from rollmill.rewards.foreign_functions import adapt_function
from rollmill.rewards.values import validate_result
from rollmill_grading.errors import FunctionRaisedError
from rollmill_grading.grader_pool import GraderPool
from rollmill_grading.worker_process import GraderResult, WorkerFunction

LONGEST_S = 0.05
"""Wall seconds after which a call in this thread is cut off."""
MEAN_S, START_S = 0.001, 0.05
"""Processor seconds that such a call may take on average, and all of them together in addition: first calls compile
regular expressions and import modules."""
_IMPORT = "<frozen importlib._bootstrap>"

_log = logging.getLogger(__name__)


class ThreadCalls:
    """Calls a function in a thread, and awaits what is awaitable in the event loop of `threads`."""

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        threads: FunctionThreads,
        time_limit_s: float,
        *,
        is_async: bool,
    ) -> None:
        self._name, self._function, self._threads = name, function, threads
        self._time_limit_s, self._is_async = time_limit_s, is_async

    def inline(self, arguments: list[Any], options: dict[str, Any]) -> GraderResult | None:
        return None

    async def call(self, arguments: list[Any], options: dict[str, Any]) -> GraderResult:
        """Return what the function returns, checked by `validate_result`, or the outcome `timeout`."""
        loop, limit = asyncio.get_running_loop(), self._time_limit_s
        call, started = partial(self._function, *arguments, **options), loop.time()
        try:
            found = call() if self._is_async else await self._threads.call(self._name, call, limit)
            if inspect.isawaitable(found):
                found = await self._threads.run(self._name, found, max(started + limit - loop.time(), 0.0))
        except FunctionTimeoutError:
            return GraderResult("timeout")
        return GraderResult("ok", validate_result(found, isinstance(arguments[1], list)))


class ProcessCalls:
    """Calls a function in a pool's processes; while it is quick, in the run's own thread, which saves the hand-over.

    A call in this thread gets a copy of its arguments, as a process would. One that is not quick is cut off by an alarm
    signal, and repeated in a process, which can be killed at its time limit; all later calls go there, too. Signals
    reach the main thread only: calls of other threads go to a process.

    Args:
        quick: whether calls are tried in this thread.
        warm: called once, when later calls belong in a process: notes what the pool's processes will load.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        pool: GraderPool,
        source: str,
        time_limit_s: float,
        *,
        quick: bool,
        warm: Callable[[], None],
    ) -> None:
        self._name, self._function, self._warm = name, function, warm
        self._pool, self._source, self._time_limit_s = pool, source, time_limit_s
        self._quick, self._seconds, self._calls = quick, 0.0, 0
        if not quick:
            warm()

    async def call(self, arguments: list[Any], options: dict[str, Any]) -> GraderResult:
        """Return a process's answer: what the function returns, checked by `validate_result`, or the outcome `timeout`.

        Raises GradingError if the function raises, RewardError if the arguments cannot be sent.
        """
        with _advice_on_copies():
            found = await self._pool.ask(PYTHON, (arguments, options), self._time_limit_s, setup=self._source)
        if found.outcome == "memory":
            raise RewardError("it ran out of memory")
        return found

    def inline(self, arguments: list[Any], options: dict[str, Any]) -> GraderResult | None:
        """Return the same, of a call in this thread; None if the call belongs in a process.

        None also where it raised: some functions fail only here, for instance in `asyncio.run` under a running event
        loop, and a process says whether it is the function's own error.
        """
        main = threading.current_thread() is threading.main_thread()
        if not self._quick or not main or signal.getsignal(signal.SIGALRM) is None:  # None: a handler not of Python
            return None
        with _advice_on_copies():
            positional, named = pickle.loads(pickle.dumps((arguments, options)))
        started, used = time.perf_counter(), time.thread_time()
        try:
            with redirect_stdout(sys.stderr):  # as in a process
                found, sets_alarms = _cut_off_after(LONGEST_S, partial(self._function, *positional, **named))
            seconds = time.perf_counter() - started
            if inspect.isawaitable(found):
                if inspect.iscoroutine(found):
                    found.close()
                return self._stop("returned an awaitable")
            value = validate_result(found, isinstance(arguments[1], list))
        except KeyboardInterrupt:
            raise
        except _CutOffError:
            return self._stop(f"took more than {LONGEST_S * 1000:.0f} ms")
        except BaseException as error:
            return self._stop(f"raised {type(error).__name__}")
        self._seconds += time.thread_time() - used
        self._calls += 1
        if sets_alarms:  # it could take for ever next time
            self._stop("sets alarms itself")
        elif seconds > LONGEST_S or self._seconds > START_S + MEAN_S * self._calls:
            self._stop(f"took {self._seconds / self._calls * 1000:.1f} ms a call")
        return GraderResult("ok", value, run_s=seconds)

    def _stop(self, why: str) -> GraderResult | None:
        self._quick = False
        self._warm()
        _log.info("reward `%s` %s: it runs in processes from now on", self._name, why)
        return None


@contextmanager
def _advice_on_copies() -> Iterator[None]:
    try:
        yield
    except (TypeError, AttributeError, pickle.PicklingError) as error:
        text = f"the task cannot be sent to another process ({error}); set run_in: thread"
        raise RewardError(text) from error


class _CutOffError(BaseException):
    """Raised in the function by the alarm; no `except Exception` of its own catches it."""


def _cut_off_after(seconds: float, call: Callable[[], Any]) -> tuple[Any, bool]:
    """Return what `call` returns, and whether it has set or cancelled an alarm; after `seconds` raise _CutOffError in
    it.

    A timer and a handler that are there already go on afterwards.
    """
    running, armed = True, 0.0

    def cut_off(number: int, frame: FrameType | None) -> None:
        nonlocal armed
        if not running:
            return
        signal.setitimer(signal.ITIMER_REAL, seconds)  # once more, should the function catch the error
        armed = time.monotonic()
        at = frame
        while at is not None:  # a module that is half imported cannot always be imported again
            if at.f_code.co_filename == _IMPORT:
                return
            at = at.f_back
        raise _CutOffError

    handler = signal.signal(signal.SIGALRM, cut_off)
    began = armed = time.monotonic()
    left, interval = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        found = call()
        running = False
    finally:
        running = False
        rest, _ = signal.setitimer(signal.ITIMER_REAL, 0)
        own = signal.signal(signal.SIGALRM, handler)
        expected = seconds - (time.monotonic() - armed)
        if left:
            signal.setitimer(signal.ITIMER_REAL, max(left - (time.monotonic() - began), 1e-6), interval)
    return found, own is not cut_off or rest == 0 or abs(rest - expected) > seconds / 2


def load_in_process(source: str) -> Callable[[tuple[list[Any], dict[str, Any]]], Any]:
    """Return, in a process, a function that calls the user's function and gives its checked result."""
    import rollmill.types  # noqa: F401 - what the arguments are made of
    from rollmill.user_code import import_object

    function = adapt_function(import_object(source))

    def call(payload: tuple[list[Any], dict[str, Any]]) -> Any:
        arguments, options = payload
        try:
            found = function(*arguments, **options)
            if inspect.isawaitable(found):
                found = asyncio.run(_awaited(found))
            return validate_result(found, isinstance(arguments[1], list))
        except Exception as error:
            text = f"{type(error).__name__}: {error}"[:2000]
            place = user_code_location(error)
            full = f"{text} ({place})" if place else text
            raise FunctionRaisedError(full, traceback.format_exc()[-4000:]) from None
        except BaseException as error:
            text = f"RuntimeError: {type(error).__name__}: {error}"[:2000]
            raise FunctionRaisedError(text, traceback.format_exc()) from None

    return call


PYTHON = WorkerFunction("python", f"{__name__}:{load_in_process.__name__}")
"""The setup is the path of the user's function; a payload is its arguments and its options."""


async def _awaited(found: Any) -> Any:
    return await found
