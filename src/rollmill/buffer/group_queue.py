"""Queue of running and finished groups: first in, first out, in the order in which their tasks were submitted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from rollmill.errors import DeadlineError
from rollmill.types import Experience
from rollmill.waiting import patient_timeout

GroupPredicate = Callable[[Sequence[Experience]], bool]
"""Predicate on the experiences of a group."""


@dataclass(slots=True, eq=False)
class PendingGroup:
    """A running or finished group. `number` is the position in the order of submission."""

    number: int
    name: str
    future: asyncio.Future[list[Experience]]
    task: str  #: its id
    unscored: list[Experience] | None = None  #: its tokens, while rewards are awaited
    arrived: int | None = None  #: order in which its tokens arrived, from 0

    @property
    def failed(self) -> bool:
        """True if it will never have tokens."""
        return self.future.done() and (self.future.cancelled() or self.future.exception() is not None)

    @property
    def experiences(self) -> list[Experience] | None:
        """Its experiences, scored or not; None while their tokens are missing."""
        return self.future.result() if self.future.done() and not self.failed else self.unscored


class GroupQueue:
    """Running and finished groups, in the order of submission.

    Batches are taken in that order, whichever finishes first, so that short completions are not favoured and a run is
    reproducible.
    """

    def __init__(self) -> None:
        self._groups: dict[int, PendingGroup] = {}  # by number, in order
        self._arrivals = 0
        self._news = asyncio.Event()

    def __len__(self) -> int:
        return len(self._groups)

    def put(self, number: int, name: str, future: asyncio.Future[list[Experience]], task: str = "") -> None:
        """Add a running group, behind those with smaller numbers; `name` (its task) appears in errors."""
        self._groups[number] = PendingGroup(number, name, future, task)
        self._groups = dict(sorted(self._groups.items()))
        future.add_done_callback(lambda done: self._arrive(number, done))

    def generated(self, number: int, experiences: list[Experience]) -> None:
        """Record the tokens of a running group; the same experiences are scored later."""
        group = self._groups[number]
        group.unscored = experiences
        self._arrive(number, group.future)

    def _arrive(self, number: int, future: asyncio.Future[list[Experience]]) -> None:
        group = self._groups.get(number)
        if group is not None and group.future is future and group.arrived is None:
            group.arrived, self._arrivals = self._arrivals, self._arrivals + 1
        self._news.set()

    def withdraw(self, number: int) -> None:
        """Remove a group without cancelling it."""
        del self._groups[number]
        self._news.set()

    async def drop(self, numbers: Sequence[int]) -> None:
        """Cancel groups and remove them."""
        futures = [self._groups.pop(number).future for number in numbers]
        for future in futures:
            future.cancel()
        await asyncio.gather(*futures, return_exceptions=True)

    def tokens_of(self, number: int) -> list[Experience]:
        """The experiences of a group that has its tokens."""
        known = self._groups[number].experiences
        assert known is not None
        return known

    # -- waiting for tokens --------------------------------------------------------------------------------------

    def first(self, count: int) -> list[PendingGroup]:
        """The oldest groups."""
        return list(self._groups.values())[:count]

    def all_have_tokens(self, count: int | None = None) -> bool:
        """True if the `count` oldest groups (None: all) have their tokens."""
        return all(group.experiences is not None for group in list(self._groups.values())[:count])

    def failed(self) -> bool:
        """True if a group has failed."""
        return any(group.failed for group in self._groups.values())

    def raise_failure(self) -> None:
        """Raise the exception of the first failed group, if any."""
        for group in self._groups.values():
            if group.failed:
                group.future.result()

    async def wait_all_generated(self, count: int | None = None) -> None:
        """Wait until the `count` oldest groups (None: all) have their tokens, or a group has failed."""
        await self._until(lambda: self.all_have_tokens(count))

    async def wait_first_generated(
        self,
        numbers: Sequence[int],
        count: int,
        *,
        needed: Sequence[int] = (),
        counts: GroupPredicate = lambda group: True,
    ) -> list[int]:
        """Wait for the first `count` of these groups to have their tokens; returns them in the order of their numbers.

        Returns fewer if a group has failed, or if all have their tokens.

        Args:
            needed: groups (at most `count`) that have to be among them.
            counts: whether a group counts.
        """

        def chosen() -> list[int]:
            there = [self._groups[number] for number in self.there(numbers, counts)]
            # One that has just ended, whose callback is still to come, is the last to arrive.
            order = {each.number: self._arrivals if each.arrived is None else each.arrived for each in there}
            there.sort(key=lambda each: (each.number not in needed, order[each.number]))
            return sorted(each.number for each in there[:count])

        def complete() -> bool:
            missing = {number for number in numbers if self._groups[number].experiences is None}
            return not missing or (len(chosen()) == count and missing.isdisjoint(needed))

        await self._until(complete)
        return chosen()

    def there(self, numbers: Sequence[int], counts: GroupPredicate) -> list[int]:
        """Filter these groups: those that have their tokens and count."""
        known = ((number, self._groups[number].experiences) for number in numbers)
        return [number for number, group in known if group is not None and counts(group)]

    async def wait_for_news(self, seconds: float) -> None:
        """Wait until a group has tokens or rewards, or has failed; at most this long."""
        self._news.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._news.wait()

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not (condition() or self.failed()):
            self._news.clear()
            await self._news.wait()

    # -- taking ------------------------------------------------------------------------------------------------

    def peek(self, groups: int) -> list[list[Experience]] | None:
        """Next result of `get`, scored or not; None while some tokens are missing."""
        found = [group.experiences for group in self.first(groups)]
        return None if any(each is None for each in found) else [each for each in found if each is not None]

    async def get(self, groups: int, deadline_s: float) -> list[list[Experience]]:
        """Take the experiences of the oldest groups, group by group, once all of them are finished.

        Raises:
            DeadlineError: some group is unfinished after `deadline_s` seconds; nothing is taken.
        """
        wanted = self.first(groups)
        await self._wait(wanted, deadline_s)
        for group in wanted:
            del self._groups[group.number]
        return [group.future.result() for group in wanted]

    def all(self) -> list[PendingGroup]:
        """All groups, finished or not, oldest first."""
        return list(self._groups.values())

    def restore(self, groups: dict[int, list[Experience]]) -> None:
        """Add finished groups of a checkpoint, by number."""
        for number, experiences in groups.items():
            done: asyncio.Future[list[Experience]] = asyncio.get_running_loop().create_future()
            done.set_result(experiences)
            self.put(number, f"task {experiences[0].task_id}" if experiences else "a group that was rejected", done)

    async def cancel(self) -> None:
        """Drop everything."""
        await self.drop(list(self._groups))

    @staticmethod
    async def _wait(wanted: list[PendingGroup], deadline_s: float) -> None:
        if not wanted:
            return
        futures = [group.future for group in wanted]
        with suppress(TimeoutError):
            async with patient_timeout(deadline_s):
                await asyncio.wait(futures, return_when=asyncio.FIRST_EXCEPTION)
        for future in futures:
            if future.done():
                future.result()  # raises what the group raised
        if not all(future.done() for future in futures):
            late = [group.name for group in wanted if not group.future.done()]
            raise DeadlineError(
                "the trainer",
                f"{len(late)} of {len(wanted)} groups of the explorer (first: {', '.join(late[:3])})",
                deadline_s,
                "Raise rollout.deadline_s, lower rollout.max_new_tokens, or look for a reward that hangs.",
            )
