"""A fair semaphore for callers with and without an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager


class FairSemaphore:
    """`count` slots, given in order of arrival."""

    def __init__(self, count: int) -> None:
        assert count >= 1
        self._free = count
        self._waiting: deque[Future[None]] = deque()
        self._lock = threading.Lock()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Hold a slot, in a thread."""
        self._acquire().result()
        try:
            yield
        finally:
            self._release()

    @asynccontextmanager
    async def turn_async(self) -> AsyncIterator[None]:
        """Hold a slot, in a coroutine, which may be cancelled while it waits."""
        slot = self._acquire()
        try:
            await asyncio.wrap_future(slot)
        except asyncio.CancelledError:
            if not slot.cancel():
                self._release()
            raise
        try:
            yield
        finally:
            self._release()

    def _acquire(self) -> Future[None]:
        slot: Future[None] = Future()
        with self._lock:
            if self._free:
                self._free -= 1
                slot.set_result(None)
            else:
                self._waiting.append(slot)
        return slot

    def _release(self) -> None:
        with self._lock:
            while self._waiting:
                following = self._waiting.popleft()
                if following.set_running_or_notify_cancel():
                    break
            else:
                self._free += 1
                return
        following.set_result(None)
