"""Handles Ctrl-C, SIGTERM and SIGHUP: the first is an Interrupted at the next wait inside of `guard`, the second ends
the run at once.

The table in loop.py says what is finished and what is stored. `Orchestrator._stage` answers an Interrupted with a
checkpoint, and `launch.py` with the message and the exit code.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TypeVar

from rollmill.progress import count_signals, ends_for_restart
from rollmill.startup import ending_signals

T = TypeVar("T")

_ENDING = b"\nending with a checkpoint of the last step; press Ctrl-C again to end at once\n"


class Interrupted(Exception):  # noqa: N818  not an error
    """The user asked the run to stop."""


class Interrupts:
    """Turns signals, or requests of other threads, into an Interrupted at the next wait or step boundary."""

    def __init__(self) -> None:
        self.requested = False
        self._event = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Handle the signals inside; off the main thread, where Python receives no signals, only requests.

        SIGHUP, which a closed terminal sends, stays ignored under `nohup`.
        """
        self._loop = asyncio.get_running_loop()
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = {number: signal.signal(number, self._handle) for number in ending_signals()}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        new = count_signals()
        if new == 0:
            return
        if new > 1 or self.requested:
            raise KeyboardInterrupt
        self.request()
        if not ends_for_restart():
            with suppress(OSError):  # SIGHUP comes because the terminal is gone
                os.write(2, _ENDING)  # a signal may come in the middle of a print, which cannot be entered twice

    def request(self) -> bool:
        """Request a clean stop, from any thread; False if nothing is running yet that could stop so."""
        self.requested = True
        if self._loop is None:
            return False
        with suppress(RuntimeError):  # the loop has ended by itself
            self._loop.call_soon_threadsafe(self._event.set)
        return True

    async def wait(self) -> None:
        """Wait for a signal or a request."""
        await self._event.wait()

    def check(self) -> None:
        """Raise Interrupted if a signal came."""
        if self.requested:
            raise Interrupted

    async def guard(self, work: Awaitable[T]) -> T:
        """Return the result of `work`, unless a signal comes first: then `work` is cancelled and Interrupted raised.
        Work that ignores the cancellation is finished and its result returned."""
        task = asyncio.ensure_future(work)
        signalled = asyncio.ensure_future(self._event.wait())
        try:
            self.check()
            await asyncio.wait({task, signalled}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                task.cancel()
                await asyncio.wait({task})
                if task.cancelled():
                    raise Interrupted
                if (error := task.exception()) is not None:  # by the cancellation, or of what it could not cancel
                    raise Interrupted from error
            return task.result()
        finally:
            for pending in (task, signalled):
                pending.cancel()
            await asyncio.gather(task, signalled, return_exceptions=True)
