"""Learning from what a served application does: its finished sessions are the rollouts.

application -> endpoint -> sessions, rewarded and committed -> groups -> pipeline -> store -> batch
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from rollmill.buffer.base import FEEDBACK, ExperienceKind, Group
from rollmill.config.workflows import TrafficWorkflow
from rollmill.data import Sampler
from rollmill.orchestrator.batch_reader import oldest_allowed
from rollmill.orchestrator.batches import RolloutBatches
from rollmill.rollout.endpoint.protocol import ApiError
from rollmill.rollout.endpoint.session import EndpointSession, FinishedSession
from rollmill.types import Experience, Task


class SessionGrouper:
    """Where committed sessions go: they are put together to groups, which pass the pipeline.

    Until a session's group is in the store, the session itself is there: a process that ends loses none.

    Args:
        size: sessions per group, where those that began alike are compared.
    """

    def __init__(self, config: TrafficWorkflow, size: int, supply: TrafficBatches) -> None:
        self._config, self._size, self._supply = config, size, supply
        self._waiting: OrderedDict[str, list[list[Experience]]] = OrderedDict()  # by prompt, the oldest first
        for prompt, experiences in supply.kept():
            self._take(prompt, experiences)

    def check(self, session: EndpointSession) -> None:
        """See Sink: what has no reward cannot be learned from."""
        if session.reward is None:
            text = f"session {session.id} has no reward; post it to /feedback first"
            raise ApiError(text, 409, code="no_reward")

    def take(self, finished: FinishedSession) -> int:
        """See Sink. Raises StoreError where the session cannot be written."""
        self._supply.keep(finished.prompt, finished.experiences)
        return self._take(finished.prompt, finished.experiences)

    def _take(self, prompt: str, experiences: list[Experience]) -> int:
        if self._config.group == "session":
            self._supply.arrived([experiences])
            return 0
        alike = self._waiting.setdefault(prompt, [])
        alike.append(experiences)
        if len(alike) == self._size:
            self._supply.arrived(self._waiting.pop(prompt))
        if sum(map(len, self._waiting.values())) <= self._config.pending:
            return 0
        _, oldest = self._waiting.popitem(last=False)
        self._supply.forget(oldest)
        return len(oldest)


class TrafficBatches(RolloutBatches):
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

    def keep(self, prompt: str, session: list[Experience]) -> None:
        """Write a session down, with how it began, until its group is there."""
        info = {"prompt": prompt}
        self._store.put([Group(_kept_as(session), session, ExperienceKind.PARTIAL, writer=self.writer, info=info)])

    def kept(self) -> list[tuple[str, list[Experience]]]:
        """Sessions that were written down, and whose group is not there."""
        return [(group.info["prompt"], group.experiences) for _, group in self._store.read(ExperienceKind.PARTIAL)]

    def forget(self, sessions: Sequence[list[Experience]]) -> None:
        """Sessions need not be kept any longer."""
        self._store.remove([_kept_as(session) for session in sessions], by="rollmill serve")

    def arrived(self, sessions: Sequence[list[Experience]]) -> None:
        """The sessions of a group are there; their experiences get its name."""
        task = asyncio.ensure_future(self._take_in(sessions))
        self._coming.add(task)
        task.add_done_callback(self._coming.discard)

    async def _take_in(self, sessions: Sequence[list[Experience]]) -> None:
        experiences = [each for session in sessions for each in session]
        for each in experiences:
            each.group = sessions[0][0].id
        try:
            async with self._turn:
                self._observe(experiences)
                await self._verify(experiences, self._version)
                self.forget(sessions)
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
        """See RolloutBatches."""
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
        return oldest_allowed(self._config, version)


def _kept_as(session: list[Experience]) -> str:
    return f"{session[0].id}@kept"


class NoTasksSampler(Sampler):
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

    def resume(self, state: dict[str, Any]) -> None:
        """See Sampler."""

    def state_dict(self) -> dict[str, Any]:
        """See Sampler."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See Sampler."""
