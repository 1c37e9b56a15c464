"""Batches of rollouts that an application sends at any time, instead of the sampler and the explorer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from rollmill.buffer.base import FEEDBACK, ExperienceKind, Group
from rollmill.data import Sampler
from rollmill.orchestrator.batches import RolloutBatches
from rollmill.progress import Progress, count_progress
from rollmill.types import Experience, Task

_LOOK_S = 1.0


class LiveRequestBatches(RolloutBatches):
    """Batches of groups that applications send at any time.

    Groups pass the pipeline and are stored at once, as they cannot be sent again. Those that become staler than
    `max_staleness` before a batch is complete are not trained on.
    """

    writer = FEEDBACK  # marks groups that a resumed run cannot make again

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options | {"shared": True})
        self._news, self._turn = asyncio.Event(), asyncio.Lock()
        self._coming: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None
        self._version = self._first_version

    def keep(self, prompt: str, session: list[Experience]) -> None:
        """Store a session with its first prompt, until its group is complete."""
        info = {"prompt": prompt}
        self._store.put([Group(_kept_as(session), session, ExperienceKind.PARTIAL, writer=self.writer, info=info)])

    def kept(self) -> list[tuple[str, list[Experience]]]:
        """Stored sessions whose group is not complete."""
        return [(group.info["prompt"], group.experiences) for _, group in self._store.read(ExperienceKind.PARTIAL)]

    def forget(self, sessions: Sequence[list[Experience]]) -> None:
        """Remove stored sessions."""
        self._store.remove([_kept_as(session) for session in sessions], by="rollmill serve")

    def arrived(self, sessions: Sequence[list[Experience]]) -> None:
        """Process the sessions of a complete group; their experiences get its name."""
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
                await self._process_group(experiences, self._version)
                self.forget(sessions)
        except Exception as error:
            self._failure = error
        self._news.set()

    async def roll_out(self, version: int, deadlines: int = 1) -> None:
        """Wait for a batch, without a deadline, as sessions take any time. Raises errors of the pipeline or store."""
        self._version = version
        while self._failure is None and self._waiting(version) < self._config.rollout.batch:
            self._news.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await self._news.wait()
            count_progress(Progress.PHASES)  # applications may be silent for any time
        if self._failure is not None:
            raise self._failure

    def peek(self) -> None:
        """None: nothing is computed ahead while requests are served."""

    async def close(self) -> None:
        """Stop, once all received groups are stored."""
        await asyncio.gather(*self._coming)
        await super().close()


def _kept_as(session: list[Experience]) -> str:
    return f"{session[0].id}@kept"


class NoTasksSampler(Sampler):
    """Sampler of a stage without tasks."""

    @property
    def uses_success(self) -> bool:
        return False

    @property
    def epoch(self) -> int:
        return 0

    def next(self, step: int = 0) -> Task:
        raise AssertionError("an application asks, not the sampler")

    def observe(self, task_id: str, successes: Sequence[float]) -> None:
        """No-op: results choose no task."""

    def metrics(self) -> dict[str, float]:
        return {}

    def progress(self) -> dict[str, Any]:
        return {}

    def resume(self, state: dict[str, Any]) -> None:
        """No-op: there is no progress."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """No-op: there is no state."""
