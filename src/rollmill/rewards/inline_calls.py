"""Calls of a user's quick function in the run's own thread, which saves the hand-over to a process.

A call that is not quick is cut off by an alarm signal. It is then repeated in a process, which can be killed at its
time limit, and all later ones go there, too. Signals reach the main thread only; calls of other threads go to a process
at once.
"""

from __future__ import annotations

import inspect
import logging
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from types import FrameType
from typing import Any

LONGEST_S = 0.05
"""Wall seconds after which a call is cut off."""
MEAN_S, START_S = 0.001, 0.05
"""Processor seconds that a call may take on average, and all of them together in addition: first calls compile regular
expressions and import modules."""
_IMPORT = "<frozen importlib._bootstrap>"

_log = logging.getLogger(__name__)


class _CutOffError(BaseException):
    """Raised in the function by the alarm; no `except Exception` of its own catches it."""


class InlineCalls:
    """Calls a function as long as it is quick, with a copy of its arguments, as a process would get.

    Args:
        name: its name, for the log.
        stopped: called once, when later calls belong in a process.
    """

    def __init__(self, name: str, function: Callable[..., Any], stopped: Callable[[], None] = lambda: None) -> None:
        self._name, self._function, self._stopped = name, function, stopped
        self._seconds, self._calls = 0.0, 0
        self.quick = hasattr(signal, "setitimer")  #: False as soon as calls belong in a process

    def call(
        self, arguments: list[Any], options: dict[str, Any], read: Callable[[Any], Any]
    ) -> tuple[Any, float] | None:
        """Return `read(function(*arguments, **options))` and the wall seconds it took, or None: call it in a process.

        None also where it raised: some functions fail only here, for instance in `asyncio.run` under a running event
        loop, and a process says whether it is the function's own error.

        Raises TypeError, AttributeError or PicklingError if the arguments cannot be copied.
        """
        if not self.quick or threading.current_thread() is not threading.main_thread():
            return None
        copied = pickle.loads(pickle.dumps((arguments, options)))
        started, used = time.perf_counter(), time.thread_time()
        try:
            with redirect_stdout(sys.stderr), _alarm(LONGEST_S) as alarm:  # as in a process
                if alarm is None:
                    return None
                found = self._function(*copied[0], **copied[1])
        except KeyboardInterrupt:
            raise
        except _CutOffError:
            self._stop(f"took more than {LONGEST_S * 1000:.0f} ms")
            return None
        except BaseException as error:
            self._stop(f"raised {type(error).__name__}")
            return None
        seconds = time.perf_counter() - started
        if inspect.isawaitable(found):
            if inspect.iscoroutine(found):
                found.close()
            self._stop("returned an awaitable")
            return None
        try:
            value = read(found)
        except (TypeError, ValueError):
            self._stop("returned an invalid value")
            return None
        self._seconds += time.thread_time() - used
        self._calls += 1
        if alarm.taken:  # it could take for ever next time
            self._stop("sets alarms itself")
        elif seconds > LONGEST_S or self._seconds > START_S + MEAN_S * self._calls:
            self._stop(f"took {self._seconds / self._calls * 1000:.1f} ms a call")
        return value, seconds

    def _stop(self, why: str) -> None:
        self.quick = False
        self._stopped()
        _log.info("reward `%s` %s: it runs in processes from now on", self._name, why)


@dataclass
class _Alarm:
    taken: bool = False  #: the block has set or cancelled an alarm


@contextmanager
def _alarm(seconds: float) -> Iterator[_Alarm | None]:
    """Raise _CutOffError in the block after `seconds`. None if another program's handler cannot be put back.

    A timer and a handler that are there already go on afterwards.
    """
    if signal.getsignal(signal.SIGALRM) is None:  # not set by Python
        yield None
        return
    running, alarm, armed = True, _Alarm(), 0.0

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
        yield alarm
        running = False
    finally:
        running = False
        rest, _ = signal.setitimer(signal.ITIMER_REAL, 0)
        own = signal.signal(signal.SIGALRM, handler)
        expected = seconds - (time.monotonic() - armed)
        alarm.taken = own is not cut_off or rest == 0 or abs(rest - expected) > seconds / 2
        if left:
            signal.setitimer(signal.ITIMER_REAL, max(left - (time.monotonic() - began), 1e-6), interval)
