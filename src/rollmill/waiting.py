"""Deadlines that allow for a process that was held up, and that stand still while an external service is down."""

from __future__ import annotations

import asyncio
import logging
import os
import select
import shutil
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

Result = TypeVar("Result")

_GRACE_S = 1.0
_LOOK_S = 0.05
_log = logging.getLogger(__name__)


async def wait_with_grace(answer: Awaitable[Result], seconds: float) -> Result:
    """Return the result of `answer` if it arrives within `seconds`; else cancel it and raise TimeoutError.

    If this process was held up (work in its event loop, Ctrl-Z), the answer may have arrived unnoticed before the
    deadline, so it gets a short grace period.
    """
    task = asyncio.ensure_future(answer)
    try:
        for limit in (seconds, _GRACE_S):
            if not task.done():
                await asyncio.wait([task], timeout=limit)
        if not task.done():
            raise TimeoutError
        return task.result()
    finally:
        task.cancel()


def exit_when_closed(connection: int, folder: Path, grace_s: float = 3.0) -> None:
    """End this process once the other end of a connection is closed, whatever its main thread waits for.

    Call it before torch is imported, which takes seconds in which nothing else is noticed.

    Args:
        connection: file descriptor of a pipe or socket, which others may read meanwhile.
        folder: shared with the other process, which cannot remove it any more.
        grace_s: seconds for the main thread to notice by itself.
    """

    def watch() -> None:
        closed = select.poll()
        closed.register(connection, 0)  # wakes when it is closed, and for nothing else
        closed.poll()
        time.sleep(grace_s)
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@dataclass(frozen=True, slots=True)
class Outage:
    """A service that does not answer. `since` is in seconds of time.monotonic."""

    name: str  #: such as `the judge m at http://localhost:8000/v1`
    reason: str
    since: float


class OutageLog:
    """Services of others that this process needs and that are unavailable at present; may be used from any thread.

    Whoever notices this bounds how long. Until then the deadlines of waits that may depend on it stand
    still: see `patient_timeout`.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._outages: dict[str, Outage] = {}
        self._ended_s = 0.0  # of earlier times when any was unavailable
        self._began = 0.0  # start of the present one
        self._listeners: list[Callable[[str], None]] = []
        self._told: deque[str] = deque(maxlen=64)

    def begin(self, name: str, reason: str, text: str = "") -> None:
        """Record that a service is unavailable, unless that is known. `text` tells the user."""
        with self._lock:
            if name in self._outages:
                return
            if not self._outages:
                self._began = self._clock()
            self._outages[name] = Outage(name, reason, self._clock())
        self._show(text)

    def end(self, name: str, text: str = "") -> None:
        """Record that it answers again, or is no longer needed. `text` tells the user."""
        with self._lock:
            if self._outages.pop(name, None) is None:
                return
            if not self._outages:
                self._ended_s += self._clock() - self._began
        self._show(text)

    def seconds(self) -> float:
        """Seconds so far in which at least one service was unavailable."""
        with self._lock:
            return self._ended_s + (self._clock() - self._began if self._outages else 0.0)

    def current(self) -> list[Outage]:
        """The unavailable services, in the order in which they failed."""
        with self._lock:
            return list(self._outages.values())

    def describe(self) -> str:
        """Describe what is unavailable, as in `waits for ...`; empty if nothing is."""
        now = self._clock()
        return ", ".join(f"{each.name} ({each.reason}; for {now - each.since:.0f} s)" for each in self.current())

    @contextmanager
    def listening(self, listener: Callable[[str], None]) -> Iterator[None]:
        """Inside, `listener` is called with each text for the user, from any thread; else it is logged."""
        self._listeners.append(listener)
        try:
            yield
        finally:
            self._listeners.remove(listener)

    def tell(self, text: str) -> None:
        """Tell the user that something has failed, or works again, though the run goes on."""
        self._told.append(text)
        self._show(text)

    def take_told(self) -> list[str]:
        """Return what was told since the last call, at most the last 64 texts: an explorer passes it to the trainer."""
        found = [self._told.popleft() for _ in range(len(self._told))]
        return list(filter(None, found))

    def _show(self, text: str) -> None:
        if text and not self._listeners:
            _log.warning("%s", text)
        for listener in self._listeners if text else ():
            listener(text)


OUTAGES = OutageLog()
"""The outages of this process."""


@asynccontextmanager
async def patient_timeout(seconds: float | None) -> AsyncIterator[asyncio.Timeout]:
    """asyncio.timeout, whose clock stands still while a service is unavailable. Raises TimeoutError."""
    loop, limit = asyncio.get_running_loop(), asyncio.timeout(None)
    timers: list[asyncio.TimerHandle] = []  # the next one

    def check() -> None:
        assert seconds is not None
        if (left := began + seconds + OUTAGES.seconds() - earlier - loop.time()) > 0:
            timers[:] = [loop.call_later(max(left, _LOOK_S), check)]
        else:
            limit.reschedule(loop.time())

    async with limit:
        began, earlier = loop.time(), OUTAGES.seconds()
        if seconds is not None:
            timers.append(loop.call_later(seconds, check))
        try:
            yield limit
        finally:
            for timer in timers:
                timer.cancel()
