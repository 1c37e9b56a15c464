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
        self.count = count
        self._free = count
        self._waiting: deque[tuple[Future[None], int]] = deque()
        self._lock = threading.Lock()

    @contextmanager
    def turn(self, slots: int = 1) -> Iterator[None]:
        """Hold slots (at most all of them), in a thread."""
        self._acquire(slots).result()
        try:
            yield
        finally:
            self._release(slots)

    @asynccontextmanager
    async def turn_async(self, slots: int = 1) -> AsyncIterator[None]:
        """Hold slots (at most all of them), in a coroutine, which may be cancelled while it waits."""
        turn = self._acquire(slots)
        try:
            await asyncio.wrap_future(turn)
        except asyncio.CancelledError:
            if turn.cancel():
                self._release(0)  # those behind it may fit
            else:
                self._release(slots)
            raise
        try:
            yield
        finally:
            self._release(slots)

    def _acquire(self, slots: int) -> Future[None]:
        assert 1 <= slots <= self.count
        turn: Future[None] = Future()
        with self._lock:
            if self._free >= slots and not self._waiting:
                self._free -= slots
                turn.set_result(None)
            else:
                self._waiting.append((turn, slots))
        return turn

    def _release(self, slots: int) -> None:
        served = []
        with self._lock:
            self._free += slots
            while self._waiting:
                following, needed = self._waiting[0]
                if not following.cancelled() and needed > self._free:
                    break
                self._waiting.popleft()
                if following.set_running_or_notify_cancel():
                    self._free -= needed
                    served.append(following)
        for following in served:
            following.set_result(None)
