"""Waiting for another process, from an event loop that may itself be held up."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

Result = TypeVar("Result")

_GRACE_S = 1.0


async def wait_with_grace(answer: Awaitable[Result], seconds: float) -> Result:
    """What `answer` gives, if it is there within `seconds`; else TimeoutError, and the wait for it is cancelled.

    While this process was held up (work in its event loop, Ctrl-Z) the answer may have come, and its deadline has
    passed before anybody could look. So it is looked for once more.
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
