"""Rate limits: no more than so much in any window of time."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable

WINDOW_S = 60.0


class Window:
    """Lets through at most `limit` units in any `WINDOW_S` seconds, first come, first served.

    A single request for more than `limit` goes through alone, once the window is empty. `clock` and `sleep` are in
    seconds.
    """

    def __init__(
        self,
        limit: int,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._limit, self._clock, self._sleep = limit, clock, sleep
        self._passed: deque[tuple[float, int]] = deque()
        self._sum = 0
        self._turn = asyncio.Lock()

    async def enter(self, units: int = 1) -> None:
        """Wait until `units` more fit into the window, and take them."""
        async with self._turn:
            while (wait := self._wait(units)) > 0:
                await self._sleep(wait)
            self._passed.append((self._clock(), units))
            self._sum += units

    def _wait(self, units: int) -> float:
        """Seconds until the oldest entry leaves, where there is no room; else 0."""
        now = self._clock()
        while self._passed and now - self._passed[0][0] > WINDOW_S:
            self._sum -= self._passed.popleft()[1]
        if not self._passed or self._sum + units <= self._limit:
            return 0.0
        return max(self._passed[0][0] + WINDOW_S - now, 0.0) + 1e-3
