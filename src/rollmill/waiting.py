"""Waits with deadlines that are fair to a process that was held up; for the clients of other processes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

Result = TypeVar("Result")

_GRACE_S = 1.0


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
