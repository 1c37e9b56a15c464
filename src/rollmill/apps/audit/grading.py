"""Scores completions that an audit makes up with the run's RewardManager, and measures the time."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from rollmill.errors import RewardError
from rollmill.rewards import RewardManager, RewardResult
from rollmill.rewards.base import LATE, TIMEOUT
from rollmill.rewards.grading import completion_from_text
from rollmill.types import Completion, Task

_AT_ONCE = 64
_LATE, _LATE_SHARE = 8, 0.05  # late results (count, share of all) from which on the rest is cancelled
NOT_GRADED = RewardResult(None, {}, {}, 0.0)
"""Placeholder for a result if the reward failed, or was no longer called."""
ResultT = TypeVar("ResultT")


class AuditGrader:
    """Counts and times all reward results."""

    def __init__(self, rewards: RewardManager) -> None:
        self._rewards = rewards
        self._slots = asyncio.Semaphore(_AT_ONCE)
        self.seconds: list[float] = []  #: per result, without the wait for a worker
        self.groupwise = rewards.groupwise
        self.outcomes: Counter[str] = Counter()
        self.late: list[str] = []  #: tasks with a timeout
        self.failed: dict[str, str] = {}  #: task -> exception of a reward
        self._ended = asyncio.Event()
        self._count = 0
        self._pending: set[asyncio.Future[Any]] = set()

    @property
    def timed_out(self) -> bool:
        """True if there were too many timeouts, so that rewards are no longer called."""
        return self._ended.is_set()

    async def score(self, task: Task, texts: Sequence[str]) -> list[RewardResult]:
        """Return the rewards of completions of a task; they are one group if a reward compares completions.

        A reward that raises is recorded, and its result is NOT_GRADED. So is every further result after too many
        timeouts.
        """
        completions = [completion_from_text(task, text, index) for index, text in enumerate(texts)]
        if self._rewards.groupwise:
            async with self._slots:
                work = self._rewards.score_group(task, completions)
                found = await self._catch(task, work, [NOT_GRADED] * len(texts))
            for each in found:
                self._record(task, each)
        else:
            found = list(await asyncio.gather(*(self._one(task, each) for each in completions)))
        return found

    async def _one(self, task: Task, completion: Completion) -> RewardResult:
        async with self._slots:
            found = await self._catch(task, self._rewards.score(task, completion), NOT_GRADED)
        self._record(task, found)
        return found

    async def _catch(self, task: Task, work: Coroutine[Any, Any, ResultT], otherwise: ResultT) -> ResultT:
        if self.timed_out:
            work.close()
            return otherwise
        pending = asyncio.ensure_future(work)
        self._pending.add(pending)
        try:
            return await pending
        except RewardError as error:
            self.failed.setdefault(task.id, str(error))
            return otherwise
        except asyncio.CancelledError:
            if not self._ended.is_set():
                raise
            return otherwise
        finally:
            pending.cancel()
            self._pending.discard(pending)

    def _record(self, task: Task, result: RewardResult) -> None:
        if result is NOT_GRADED:
            return
        self._count += 1
        if result.spans:
            self.seconds.append(max(span.ended - span.started for span in result.spans.values()))
        self.outcomes.update(result.outcomes.values())
        if any(outcome in (TIMEOUT, LATE) for outcome in result.outcomes.values()):
            self.late.append(task.id)
            if len(self.late) >= _LATE and len(self.late) >= _LATE_SHARE * self._count:
                self._ended.set()
                for each in self._pending:
                    each.cancel()
