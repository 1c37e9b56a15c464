"""Waits of the orchestrator, each with a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from rollmill.errors import DeadlineError

Result = TypeVar("Result")


async def wait_with_deadline(work: Awaitable[Result], seconds: float, waiter: str, owner: str) -> Result:
    """Return the result of `work`. Raises DeadlineError after `seconds`, naming the waiter and the work's owner."""
    try:
        async with asyncio.timeout(seconds):
            return await work
    except TimeoutError:
        advice = "Raise rollout.deadline_s or lower rollout.max_new_tokens, rollout.batch or rollout.group_size."
        raise DeadlineError(waiter, owner, seconds, advice) from None
