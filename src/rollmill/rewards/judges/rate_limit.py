"""Rate limits: no more than so much in any window of time."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

WINDOW_S = 60.0


class RateWindow:
    """How many units passed in the last `WINDOW_S` seconds, and when more may: at most `limit` in any such time."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._passed: deque[tuple[float, int]] = deque()
        self._sum = 0

    def wait(self, units: int, now: float) -> float:
        """Seconds until the oldest entry leaves, where there is no room for `units` more; else 0.

        More than `limit` units at once pass alone, once the window is empty.
        """
        while self._passed and now - self._passed[0][0] > WINDOW_S:
            self._sum -= self._passed.popleft()[1]
        if not self._passed or self._sum + units <= self._limit:
            return 0.0
        return max(self._passed[0][0] + WINDOW_S - now, 0.0) + 1e-3

    def take(self, units: int, now: float) -> None:
        """Count units that pass now."""
        self._passed.append((now, units))
        self._sum += units


class RateLimiter:
    """Lets a request through once it fits into every window; first come, first served.

    `limits` are the units that each window lets through. `clock` and `sleep` are in seconds.
    """

    def __init__(
        self,
        limits: Sequence[float],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._windows = [RateWindow(limit) for limit in limits]
        self._clock, self._sleep = clock, sleep
        self._turn = asyncio.Lock()

    async def enter(self, *units: int) -> None:
        """Wait until as many more units fit into each window, and take them in all windows at once."""
        async with self._turn:
            while (wait := max(map(RateWindow.wait, self._windows, units, [self._clock()] * len(units)))) > 0:
                await self._sleep(wait)
            for window, more in zip(self._windows, units, strict=True):
                window.take(more, self._clock())
