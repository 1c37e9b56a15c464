"""Scoring a text by a rubric of the caller's: what graders of short answers need."""

from __future__ import annotations

from rollmill.config.rewards import JudgeReward
from rollmill.rewards.judges.generative import GenerativeJudge
from rollmill.rewards.resources import RewardResources
from rollmill.types import Task


class RubricJudge:
    """A generative judge behind one number."""

    def __init__(self, config: JudgeReward, resources: RewardResources) -> None:
        self._judge = GenerativeJudge(config, resources)

    async def score(self, task: Task, text: str, rubric: str) -> float:
        """How well a text answers the task by a rubric, from 0 to 1; `unparsable_reward` or `timeout_reward` where the
        judge gives no verdict.

        Raises RewardError where the judge cannot be asked, ValueError where the task's data are wrong.
        """
        value = (await self._judge.grade(task, text, rubric)).value
        assert isinstance(value, float)
        return value

    def counters(self) -> dict[str, float]:
        """Calls, tokens and cost so far."""
        return self._judge.counters()
