"""The in-process store: groups of experiences, first in, first out, in the order their tasks were submitted."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

from rollmill.core.errors import DeadlineError
from rollmill.core.types import Experience


class GroupQueue:
    """Groups under way and finished, in the order they were submitted.

    Batches are taken in that order whatever finishes first, so that short completions are not favoured and a run is
    reproducible.
    """

    def __init__(self) -> None:
        self._groups: deque[tuple[str, asyncio.Future[list[Experience]]]] = deque()
        self._unjudged: dict[asyncio.Future[list[Experience]], list[Experience]] = {}
        self._news = asyncio.Event()

    def __len__(self) -> int:
        return len(self._groups)

    def put(self, name: str, group: asyncio.Future[list[Experience]]) -> None:
        """Add a group under way; `name` (its task) appears in errors."""
        self._groups.append((name, group))

    def generated(self, group: asyncio.Future[list[Experience]], experiences: list[Experience]) -> None:
        """The tokens of a group under way are there; the same experiences are judged later."""
        self._unjudged[group] = experiences
        self._news.set()

    async def all_generated(self) -> None:
        """Wait until the tokens of all groups are there, or a group has failed (`get` tells how)."""
        while True:
            done = [future for _, future in self._groups if future.done()]
            if any(future.cancelled() or future.exception() is not None for future in done):
                return
            waiting = [future for _, future in self._groups if not future.done() and future not in self._unjudged]
            if not waiting:
                return
            self._news.clear()
            news = asyncio.ensure_future(self._news.wait())
            try:
                everything: list[asyncio.Future[Any]] = [*waiting, news]
                await asyncio.wait(everything, return_when=asyncio.FIRST_COMPLETED)
            finally:
                news.cancel()

    def peek(self, groups: int) -> list[Experience] | None:
        """What `get` will give, judged or not; None where some tokens are still missing."""
        found: list[Experience] = []
        for _, future in list(self._groups)[:groups]:
            judged = future.done() and not future.cancelled() and future.exception() is None
            known = future.result() if judged else self._unjudged.get(future)
            if known is None:
                return None
            found += known
        return found

    def restore(self, groups: list[list[Experience]]) -> None:
        """Add finished groups of a checkpoint."""
        for experiences in groups:
            done: asyncio.Future[list[Experience]] = asyncio.get_running_loop().create_future()
            done.set_result(experiences)
            self.put(f"task {experiences[0].task_id}", done)

    async def get(self, groups: int, deadline_s: float) -> list[list[Experience]]:
        """The experiences of the oldest groups, group by group, once all of them are finished.

        Raises:
            DeadlineError: some group is still unfinished after `deadline_s` seconds; nothing is taken.
        """
        wanted = list(self._groups)[:groups]
        await self._wait(wanted, deadline_s)
        for _, future in wanted:
            self._groups.popleft()
            self._unjudged.pop(future, None)
        return [future.result() for _, future in wanted]

    def futures(self) -> list[asyncio.Future[list[Experience]]]:
        """All groups, finished or not, oldest first."""
        return [future for _, future in self._groups]

    async def cancel(self) -> None:
        """Drop everything."""
        futures = [future for _, future in self._groups]
        self._groups.clear()
        self._unjudged.clear()
        for future in futures:
            future.cancel()
        await asyncio.gather(*futures, return_exceptions=True)

    @staticmethod
    async def _wait(wanted: list[tuple[str, asyncio.Future[list[Experience]]]], deadline_s: float) -> None:
        if not wanted:
            return
        futures = [future for _, future in wanted]
        done, pending = await asyncio.wait(futures, timeout=deadline_s, return_when=asyncio.FIRST_EXCEPTION)
        for future in done:
            future.result()  # raises what the group raised
        if pending:
            late = [name for name, future in wanted if not future.done()]
            raise DeadlineError(
                "the trainer",
                f"{len(late)} of {len(wanted)} groups of the explorer (first: {', '.join(late[:3])})",
                deadline_s,
                "Raise rollout.deadline_s, lower rollout.max_new_tokens, or look for a reward that hangs.",
            )
