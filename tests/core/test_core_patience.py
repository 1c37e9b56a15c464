"""Waiting for others from a loop that is held up."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from rollmill.waiting import wait_with_grace


def test_an_answer_that_came_while_the_loop_was_held_up_counts() -> None:
    async def work() -> str:
        answer = asyncio.get_running_loop().create_future()
        loop = asyncio.get_running_loop()
        other = threading.Timer(0.05, loop.call_soon_threadsafe, [answer.set_result, "here"])
        other.start()
        loop.call_later(0.01, time.sleep, 0.5)
        try:
            return await wait_with_grace(answer, 0.1)
        finally:
            other.join()

    assert asyncio.run(work()) == "here"


def test_what_does_not_come_is_cancelled() -> None:
    ended: list[str] = []

    async def silent() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    async def work() -> None:
        with pytest.raises(TimeoutError):
            await wait_with_grace(silent(), 0.01)
        await asyncio.sleep(0)

    asyncio.run(work())
    assert ended == ["cancelled"]


def test_whoever_stops_waiting_cancels_it() -> None:
    async def work() -> bool:
        answer = asyncio.get_running_loop().create_future()
        waiting = asyncio.ensure_future(wait_with_grace(answer, 60))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        return answer.cancelled()

    assert asyncio.run(work())


def test_errors_are_raised() -> None:
    async def failing() -> None:
        raise LookupError("gone")

    with pytest.raises(LookupError, match="gone"):
        asyncio.run(wait_with_grace(failing(), 60))
