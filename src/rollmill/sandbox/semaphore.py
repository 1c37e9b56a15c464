"""How many jobs run at once, for callers with and without an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager


class FairSemaphore:
    """`count` turns, given first come, first served."""

    def __init__(self, count: int) -> None:
        assert count >= 1
        self._free = count
        self._waiting: deque[Future[None]] = deque()
        self._lock = threading.Lock()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """A turn, for a thread."""
        self._ask().result()
        try:
            yield
        finally:
            self._give_back()

    @asynccontextmanager
    async def turn_async(self) -> AsyncIterator[None]:
        """A turn, for a coroutine, which may be cancelled while it waits."""
        mine = self._ask()
        try:
            await asyncio.wrap_future(mine)
        except asyncio.CancelledError:
            if not mine.cancel():
                self._give_back()
            raise
        try:
            yield
        finally:
            self._give_back()

    def _ask(self) -> Future[None]:
        mine: Future[None] = Future()
        with self._lock:
            if self._free:
                self._free -= 1
                mine.set_result(None)
            else:
                self._waiting.append(mine)
        return mine

    def _give_back(self) -> None:
        with self._lock:
            while self._waiting:
                following = self._waiting.popleft()
                if following.set_running_or_notify_cancel():
                    break
            else:
                self._free += 1
                return
        following.set_result(None)
