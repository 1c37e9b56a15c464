"""Judging what an audit makes up, by the run's real judge, with the time that each judgement took."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

import numpy as np

from rollmill.errors import RewardError
from rollmill.rewards import RewardManager, RewardResult
from rollmill.rewards.base import LATE, TIMEOUT
from rollmill.types import Completion, StopReason, Task

_AT_ONCE = 64
_LATE, _LATE_SHARE = 8, 0.05  # from so many, and this share of all, on the rest is not waited for
NOT_GRADED = RewardResult(None, {}, {}, 0.0)
"""In place of a judgement where the reward failed, or was not asked any more."""
ResultT = TypeVar("ResultT")


class AuditGrader:
    """Counts and times all judgements."""

    def __init__(self, judge: RewardManager) -> None:
        self._judge = judge
        self._gate = asyncio.Semaphore(_AT_ONCE)
        self.seconds: list[float] = []  #: of a judgement, without waiting for a worker
        self.groupwise = judge.groupwise
        self.outcomes: Counter[str] = Counter()
        self.late: list[str] = []  #: tasks of judgements that took too long
        self.failed: dict[str, str] = {}  #: task -> what a reward raised
        self._ended = asyncio.Event()
        self._made = 0
        self._asked: set[asyncio.Future[Any]] = set()

    @property
    def timed_out(self) -> bool:
        """Whether too many judgements took too long, so that nothing is judged any more."""
        return self._ended.is_set()

    async def judge(self, task: Task, texts: Sequence[str]) -> list[RewardResult]:
        """What the rewards say of completions of a task; they are one group where a reward compares.

        A reward that raises is noted, and its judgement is UNJUDGED. So is what is asked, or under way, once many
        judgements have taken too long.
        """
        completions = [completion_from_text(text, index) for index, text in enumerate(texts)]
        if self._judge.groupwise:
            async with self._gate:
                work = self._judge.judge_group(task, completions)
                found = await self._caught(task, work, [NOT_GRADED] * len(texts))
            for each in found:
                self._note(task, each)
        else:
            found = list(await asyncio.gather(*(self._one(task, each) for each in completions)))
        return found

    async def _one(self, task: Task, completion: Completion) -> RewardResult:
        async with self._gate:
            found = await self._caught(task, self._judge.judge(task, completion), NOT_GRADED)
        self._note(task, found)
        return found

    async def _caught(self, task: Task, work: Coroutine[Any, Any, ResultT], otherwise: ResultT) -> ResultT:
        if self.timed_out:
            work.close()
            return otherwise
        asked = asyncio.ensure_future(work)
        self._asked.add(asked)
        try:
            return await asked
        except RewardError as error:
            self.failed.setdefault(task.id, str(error))
            return otherwise
        except asyncio.CancelledError:
            if not self._ended.is_set():
                raise
            return otherwise
        finally:
            asked.cancel()
            self._asked.discard(asked)

    def _note(self, task: Task, judgement: RewardResult) -> None:
        if judgement is NOT_GRADED:
            return
        self._made += 1
        if judgement.spans:
            self.seconds.append(max(span.ended - span.started for span in judgement.spans.values()))
        self.outcomes.update(judgement.outcomes.values())
        if any(outcome in (TIMEOUT, LATE) for outcome in judgement.outcomes.values()):
            self.late.append(task.id)
            if len(self.late) >= _LATE and len(self.late) >= _LATE_SHARE * self._made:
                self._ended.set()
                for each in self._asked:
                    each.cancel()


def completion_from_text(text: str, index: int = 0) -> Completion:
    """A completion that has only text: nothing was generated, so there are no tokens."""
    ids, numbers = np.zeros(0, np.int32), np.zeros(0, np.float32)
    return Completion(ids, ids, numbers, ids, numbers, text, StopReason.EOS, seed=0, index=index)
