"""Learning from what a served application does: its finished sessions are the rollouts.

application -> endpoint -> sessions, rewarded and committed -> groups -> pipeline -> store -> batch
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from rollmill.buffer.base import FEEDBACK
from rollmill.config.workflows import Traffic
from rollmill.core.types import Experience, Task
from rollmill.explorer.serving.refusals import ApiError
from rollmill.explorer.serving.session import Session
from rollmill.explorer.serving.sessions import Finished
from rollmill.master.supply import Supply
from rollmill.tasks import Sampler


class SessionGroups:
    """Where committed sessions go: they are put together to groups, which `arrived` is handed.

    Args:
        size: sessions per group, where those that began alike are compared.
    """

    def __init__(self, config: Traffic, size: int, arrived: Callable[[list[Experience]], None]) -> None:
        self._config, self._size, self._arrived = config, size, arrived
        self._waiting: OrderedDict[str, list[Finished]] = OrderedDict()  # by prompt, the oldest first

    def check(self, session: Session) -> None:
        """See Sink: what has no reward cannot be learned from."""
        if session.reward is None:
            text = f"session {session.id} has no reward; post it to /feedback first"
            raise ApiError(text, 409, code="no_reward")

    def take(self, finished: Finished) -> int:
        """See Sink."""
        if self._config.group == "session":
            self._arrived(finished.experiences)
            return 0
        alike = self._waiting.setdefault(finished.prompt, [])
        alike.append(finished)
        if len(alike) == self._size:
            del self._waiting[finished.prompt]
            group = alike[0].id
            for experience in (experiences := [one for each in alike for one in each.experiences]):
                experience.group = group
            self._arrived(experiences)
        if sum(map(len, self._waiting.values())) <= self._config.pending:
            return 0
        _, oldest = self._waiting.popitem(last=False)
        return len(oldest)


class OnlineSupply(Supply):
    """A Supply whose groups come from outside, when they come.

    They pass the pipeline and are in the store at once: nobody would send them again. Those that have become staler
    than `max_staleness` before a batch is there are not learned from.
    """

    writer = FEEDBACK  # of groups that a run which resumes must not make again

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._news, self._turn = asyncio.Event(), asyncio.Lock()
        self._coming: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None
        self._version = self._first_version

    def arrived(self, experiences: list[Experience]) -> None:
        """A group is there."""
        task = asyncio.ensure_future(self._take_in(experiences))
        self._coming.add(task)
        task.add_done_callback(self._coming.discard)

    async def _take_in(self, experiences: list[Experience]) -> None:
        try:
            async with self._turn:
                self._observe(experiences)
                await self._verify(experiences, self._version)
        except Exception as error:
            self._failure = error
        self._news.set()

    async def roll_out(self, version: int, deadlines: int = 1) -> None:
        """Wait until there is a batch. Nobody can say how long that takes. Raises what the pipeline or store raised."""
        self._version = version
        while self._failure is None and self._waiting(version) < self._config.rollout.batch:
            self._news.clear()
            await self._news.wait()
        if self._failure is not None:
            raise self._failure

    async def collect(self, version: int) -> list[Experience]:
        """See Supply."""
        before = self._store.expired()
        found = await super().collect(version)
        self._late = self._store.expired() - before
        return found

    def known(self) -> None:
        """Nothing is computed ahead while requests are answered."""

    async def close(self) -> None:
        """Stop, once what has come is in the store."""
        await asyncio.gather(*self._coming)
        await super().close()

    def _oldest(self, version: int) -> int:
        age = self._config.buffer.max_age
        staleness = self._config.max_staleness
        return version - (staleness if age is None else min(age, staleness))


class Unasked(Sampler):
    """The sampler of a stage without tasks."""

    def __init__(self) -> None:
        self.uses_success = False

    @property
    def epoch(self) -> int:
        """See Sampler."""
        return 0

    def next(self, step: int = 0) -> Task:
        """See Sampler."""
        raise AssertionError("an application asks, not the sampler")

    def observe(self, task_id: str, successes: Sequence[float]) -> None:
        """See Sampler."""

    def metrics(self) -> dict[str, float]:
        """See Sampler."""
        return {}

    def progress(self) -> dict[str, Any]:
        """See Sampler."""
        return {}

    def go_on(self, state: dict[str, Any]) -> None:
        """See Sampler."""

    def state_dict(self) -> dict[str, Any]:
        """See Sampler."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See Sampler."""
