"""Waiting for others from a loop that is held up."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from rollmill.waiting import OUTAGES, OutageLog, patient_timeout, wait_with_grace


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


def test_a_deadline_stands_still_while_a_service_is_away() -> None:
    async def work() -> str:
        async with patient_timeout(0.3):
            OUTAGES.begin("x", "gone")
            await asyncio.sleep(0.6)
            OUTAGES.end("x")
        return "in time"

    assert asyncio.run(work()) == "in time"


def test_a_deadline_ends_a_wait_once_all_services_are_back() -> None:
    async def work() -> bool:
        OUTAGES.begin("x", "gone")
        asyncio.get_running_loop().call_later(0.1, OUTAGES.end, "x")
        try:
            async with patient_timeout(0.05) as limit:
                await asyncio.sleep(60)
        except TimeoutError:
            return limit.expired()
        return False

    assert asyncio.run(work())


def test_a_timeout_of_the_work_itself_is_told_apart() -> None:
    async def work() -> bool:
        try:
            async with patient_timeout(60) as limit:
                raise TimeoutError
        except TimeoutError:
            return limit.expired()

    assert not asyncio.run(work())


def test_outages_that_overlap_count_once() -> None:
    now, told = 0.0, []
    log = OutageLog(lambda: now)
    with log.listening(told.append):
        log.begin("a", "503", "a is away")
        now = 2.0
        log.begin("b", "504", "b is away")
        log.begin("b", "503", "not said twice")
        now = 5.0
        assert (log.seconds(), log.describe()) == (5.0, "a (503; for 5 s), b (504; for 3 s)")
        log.end("a", "a is back")
        now = 6.0
        log.end("b", "b is back")
        log.end("b", "not said twice")
    now = 9.0
    assert (log.seconds(), log.describe()) == (6.0, "")
    assert told == ["a is away", "b is away", "a is back", "b is back"]
