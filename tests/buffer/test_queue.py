"""Groups on their way to the trainer: taken in the order of their tasks, whatever finishes first."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import numpy as np
import pytest

from rollmill.buffer.group_queue import GroupQueue
from rollmill.errors import DeadlineError
from rollmill.types import Experience

Futures = dict[int, "asyncio.Future[list[Experience]]"]


def group(name: str) -> list[Experience]:
    tokens = np.arange(3, dtype=np.int32)
    return [Experience(f"{name}/0", f"task-{name}", name, tokens, tokens > 0, np.zeros(3, np.float32), tokens)]


def run(test: Callable[[GroupQueue, Futures], Coroutine[Any, Any, None]], numbers: str = "0123") -> None:
    """Run a test on a queue with the given groups, put in this order; a wait that never ends fails."""

    async def prepared() -> None:
        queue, futures, unheard = GroupQueue(), Futures(), list[dict[str, Any]]()
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: unheard.append(context))
        for number in map(int, numbers):
            futures[number] = asyncio.get_running_loop().create_future()
            queue.put(number, f"task {number}", futures[number], f"id {number}")
        await asyncio.wait_for(test(queue, futures), 20)
        for future in futures.values():
            if future.done() and not future.cancelled():
                future.exception()
        await asyncio.sleep(0)
        assert not unheard

    asyncio.run(prepared())


async def waits(waiting: Awaitable[Any]) -> asyncio.Future[Any]:
    """The wait, begun, and not over although others have had their turns."""
    task = asyncio.ensure_future(waiting)
    for _ in range(5):
        await asyncio.sleep(0)
    assert not task.done()
    return task


def test_groups_are_handed_out_in_the_order_of_their_tasks() -> None:
    async def test(queue: GroupQueue, futures: Futures) -> None:
        assert [each.number for each in queue.all()] == [0, 1, 2, 3]
        assert [(each.number, each.name, each.task) for each in queue.first(2)] == [
            (0, "task 0", "id 0"),
            (1, "task 1", "id 1"),
        ]
        for number in (3, 1, 0):
            futures[number].set_result(group(f"g{number}"))
        assert [each[0].group for each in await queue.get(2, 5.0)] == ["g0", "g1"]
        assert len(queue) == 2
        futures[2].set_result(group("g2"))
        assert [each[0].group for each in await queue.get(9, 5.0)] == ["g2", "g3"]
        assert await queue.get(1, 0.0) == []

    run(test, numbers="2031")


def test_taking_waits_until_all_of_the_groups_are_finished() -> None:
    async def test(queue: GroupQueue, futures: Futures) -> None:
        futures[0].set_result(group("g0"))
        taking = await waits(queue.get(2, 30.0))
        assert len(queue) == 4
        futures[1].set_result(group("g1"))
        assert [each[0].group for each in await taking] == ["g0", "g1"]

    run(test)


def test_a_deadline_says_who_is_late_and_takes_nothing() -> None:
    async def test(queue: GroupQueue, futures: Futures) -> None:
        futures[1].set_result(group("g1"))
        expected = r"trainer.*4 of 5 groups of the explorer \(first: task 0, task 2, task 3\).*deadline_s"
        with pytest.raises(DeadlineError, match=expected):
            await queue.get(5, 0.01)
        assert [each.number for each in queue.all()] == [0, 1, 2, 3, 4]
        for number in (0, 2, 3, 4):
            futures[number].set_result(group(f"g{number}"))
        assert len(await queue.get(5, 1.0)) == 5

    run(test, numbers="01234")


def test_a_group_that_failed_is_raised_at_once_and_takes_nothing() -> None:
    async def test(queue: GroupQueue, futures: Futures) -> None:
        taking = await waits(queue.get(2, 30.0))
        futures[1].set_exception(ValueError("broken reward"))
        with pytest.raises(ValueError, match="broken reward"):
            await taking
        assert len(queue) == 4
        assert queue.failed()
        with pytest.raises(ValueError, match="broken reward"):
            queue.raise_failure()

    run(test)


def test_a_group_that_was_cancelled_has_failed() -> None:
    async def test(queue: GroupQueue, futures: Futures) -> None:
        queue.raise_failure()
        assert not queue.failed()
        futures[0].set_result(group("g0"))
        assert not queue.failed()
        futures[2].cancel()
        assert queue.failed()
        assert [each.experiences is None for each in queue.all()] == [False, True, True, True]
        with pytest.raises(asyncio.CancelledError):
            queue.raise_failure()

    run(test)


def test_tokens_are_known_before_their_rewards_and_after_them() -> None:
    async def test(queue: GroupQueue, futures: Futures) -> None:
        unjudged, judged = group("g0"), group("judged")
        assert queue.peek(1) is None
        assert not queue.all_have_tokens()
        queue.generated(0, unjudged)
        assert queue.tokens_of(0) is unjudged
        assert queue.all_have_tokens(1)
        assert not queue.all_have_tokens(2)
        assert queue.peek(1) == [unjudged]
        assert queue.peek(2) is None
        futures[0].set_result(judged)
        assert queue.tokens_of(0) is judged
        for number in (1, 2, 3):
            queue.generated(number, group(f"g{number}"))
        assert queue.all_have_tokens()
        assert [each[0].group for each in queue.peek(3) or []] == ["judged", "g1", "g2"]

    run(test)


def test_waiting_for_tokens_ends_with_the_last_of_them_or_with_a_failure() -> None:
    async def test(queue: GroupQueue, futures: Futures) -> None:
        two, everything = await waits(queue.wait_all_generated(2)), await waits(queue.wait_all_generated())
        queue.generated(1, group("g1"))
        queue.generated(2, group("g2"))
        assert not (await asyncio.sleep(0.01, two.done()))
        futures[0].set_result(group("g0"))
        await two
        assert not everything.done()
        futures[3].set_exception(ValueError("broken reward"))
        await everything
        await queue.wait_all_generated(2)

    run(test)


def test_waiting_for_news_ends_with_the_next_arrival_or_its_time() -> None:
    async def test(queue: GroupQueue, futures: Futures) -> None:
        futures[1].set_result(group("g1"))
        await asyncio.sleep(0.01)
        news = await waits(queue.wait_for_news(1000))  # what arrived earlier is no news
        queue.generated(2, group("g2"))
        await news
        await queue.wait_for_news(0.01)

    run(test)


def test_of_more_groups_than_needed_those_that_arrive_first_are_chosen() -> None:
    async def test(queue: GroupQueue, futures: Futures) -> None:
        choosing = await waits(queue.wait_first_generated([0, 1, 2, 3], 2))
        futures[3].set_result(group("g3"))
        await asyncio.sleep(0)
        queue.generated(1, group("g1"))
        queue.generated(0, group("g0"))
        assert await choosing == [1, 3]
        futures[1].set_result(group("g1"))  # its rewards: it arrived before, and keeps its place
        await asyncio.sleep(0)
        assert await queue.wait_first_generated([0, 1, 2, 3], 1) == [3]
        assert await queue.wait_first_generated([0, 1, 2, 3], 2) == [1, 3]
        assert await queue.wait_first_generated([0, 1, 2], 2) == [0, 1]

    run(test)


def test_a_group_that_has_ended_this_moment_arrives_last() -> None:
    """Without a report of its tokens, as of workflows, it arrives by a callback, which runs later."""

    async def test(queue: GroupQueue, futures: Futures) -> None:
        queue.generated(2, group("g2"))
        queue.generated(1, group("g1"))
        futures[0].set_result(group("g0"))
        assert await queue.wait_first_generated([0, 1, 2, 3], 2) == [1, 2]

    run(test)


def test_groups_that_are_needed_are_waited_for_and_chosen_before_others() -> None:
    async def test(queue: GroupQueue, futures: Futures) -> None:
        choosing = await waits(queue.wait_first_generated([0, 1, 2, 3], 2, needed=[2]))
        for number in (0, 1):
            queue.generated(number, group(f"g{number}"))
        await asyncio.sleep(0.01)
        assert not choosing.done()
        queue.generated(2, group("g2"))
        assert await choosing == [0, 2]

    run(test)


def test_groups_that_do_not_count_are_passed_over() -> None:
    async def test(queue: GroupQueue, futures: Futures) -> None:
        def counts(experiences: Any) -> bool:
            return experiences[0].group != "g1"

        choosing = await waits(queue.wait_first_generated([1, 2, 3], 1, counts=counts))
        queue.generated(1, group("g1"))
        queue.generated(0, group("g0"))  # none of those asked for
        await asyncio.sleep(0.01)
        assert not choosing.done()
        assert queue.there([0, 1, 2], counts) == [0]
        queue.generated(3, group("g3"))
        assert await choosing == [3]
        queue.generated(2, group("g2"))
        assert await queue.wait_first_generated([1], 1, counts=counts) == []  # all are there, and fewer count

    run(test)


def test_choosing_ends_early_where_a_group_has_failed() -> None:
    async def test(queue: GroupQueue, futures: Futures) -> None:
        choosing = await waits(queue.wait_first_generated([0, 1, 2], 2))
        queue.generated(2, group("g2"))
        futures[0].set_exception(ValueError("broken reward"))
        assert await choosing == [2]

    run(test)


def test_a_group_that_is_withdrawn_is_no_longer_waited_for() -> None:
    async def test(queue: GroupQueue, futures: Futures) -> None:
        for number in (0, 1, 3):
            queue.generated(number, group(f"g{number}"))
        waiting = await waits(queue.wait_all_generated())
        queue.withdraw(2)
        await waiting
        assert [each.number for each in queue.all()] == [0, 1, 3]
        assert not futures[2].cancelled()

    run(test)


def test_dropped_groups_are_stopped_and_forgotten() -> None:
    async def test(queue: GroupQueue, futures: Futures) -> None:
        ended: list[str] = []

        async def working() -> list[Experience]:
            try:
                await asyncio.sleep(60)
            finally:
                await asyncio.sleep(0)
                ended.append("work")
            return []

        queue.put(9, "task 9", asyncio.ensure_future(working()))
        await asyncio.sleep(0)
        await queue.drop([9, 1])
        assert ended == ["work"]
        assert futures[1].cancelled()
        assert [each.number for each in queue.all()] == [0, 2, 3]
        await queue.cancel()
        assert len(queue) == 0
        assert all(future.cancelled() for future in futures.values())

    run(test)


def test_what_a_group_that_was_replaced_does_later_does_not_matter() -> None:
    """A group that is rolled out again under its number arrives when its own tokens do."""

    async def test(queue: GroupQueue, futures: Futures) -> None:
        old, new = futures[0], asyncio.get_running_loop().create_future()
        queue.put(0, "task 0", new)
        old.set_result(group("old"))
        queue.withdraw(3)
        await asyncio.sleep(0)
        queue.generated(1, group("g1"))
        new.set_result(group("new"))
        await asyncio.sleep(0)
        assert queue.tokens_of(0)[0].group == "new"
        assert await queue.wait_first_generated([0, 1, 2], 1) == [1]

    run(test)


def test_groups_of_a_checkpoint_are_there_at_once_in_their_order() -> None:
    async def test(queue: GroupQueue, futures: Futures) -> None:
        queue.restore({7: group("g7"), 5: group("g5"), 6: []})
        assert [(each.number, each.name, each.task) for each in queue.all()] == [
            (5, "task task-g5", ""),
            (6, "a group that was rejected", ""),
            (7, "task task-g7", ""),
        ]
        assert [[one.group for one in each] for each in await queue.get(3, 0.1)] == [["g5"], [], ["g7"]]

    run(test, numbers="")
