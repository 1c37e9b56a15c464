"""Judging what an audit makes up, by the run's real judge, with the time that each judgement took."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Sequence
from typing import TypeVar

import numpy as np

from rollmill.core.errors import RewardError
from rollmill.core.types import Completion, StopReason, Task
from rollmill.rewards import Judge, Judgement
from rollmill.rewards.base import LATE, TIMEOUT

_AT_ONCE = 64
_NOTHING = Judgement(None, {}, {}, 0.0)
Found = TypeVar("Found")


class Grader:
    """Counts and times all judgements."""

    def __init__(self, judge: Judge) -> None:
        self._judge = judge
        self._gate = asyncio.Semaphore(_AT_ONCE)
        self.seconds: list[float] = []  #: of a judgement, without waiting for a worker
        self.groupwise = judge.groupwise
        self.outcomes: Counter[str] = Counter()
        self.late: list[str] = []  #: tasks of judgements that took too long
        self.failed: dict[str, str] = {}  #: task -> what a reward raised

    async def judge(self, task: Task, texts: Sequence[str]) -> list[Judgement]:
        """What the rewards say of completions of a task; they are one group where a reward compares.

        A reward that raises is noted, and gives no reward.
        """
        completions = [text_completion(text, index) for index, text in enumerate(texts)]
        if self._judge.groupwise:
            async with self._gate:
                found = await self._caught(task, self._judge.judge_group(task, completions), [_NOTHING] * len(texts))
        else:
            found = list(await asyncio.gather(*(self._one(task, each) for each in completions)))
        for each in found:
            self._note(task, each)
        return found

    async def _one(self, task: Task, completion: Completion) -> Judgement:
        async with self._gate:
            return await self._caught(task, self._judge.judge(task, completion), _NOTHING)

    async def _caught(self, task: Task, work: Awaitable[Found], otherwise: Found) -> Found:
        try:
            return await work
        except RewardError as error:
            self.failed.setdefault(task.id, str(error))
            return otherwise

    def _note(self, task: Task, judgement: Judgement) -> None:
        if judgement.spans:
            self.seconds.append(max(span.ended - span.started for span in judgement.spans.values()))
        self.outcomes.update(judgement.outcomes.values())
        if any(outcome in (TIMEOUT, LATE) for outcome in judgement.outcomes.values()):
            self.late.append(task.id)


def text_completion(text: str, index: int = 0) -> Completion:
    """A completion that has only text: nothing was generated, so there are no tokens."""
    ids, numbers = np.zeros(0, np.int32), np.zeros(0, np.float32)
    return Completion(ids, ids, numbers, ids, numbers, text, StopReason.EOS, seed=0, index=index)
