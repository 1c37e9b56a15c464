"""The math reward: grades final answers with rollmill-grading, by the settings of the run file and of the task."""

from __future__ import annotations

from collections.abc import Awaitable

from rollmill.config.rewards.math import MathReward
from rollmill.rewards.base import NO_ANSWER, TIMEOUT, Score, find_answer, task_options
from rollmill.rewards.resources import RewardResources
from rollmill.types import Completion, Task
from rollmill_grading.math_grader import MathGrader
from rollmill_grading.symbolic import ALGEBRA
from rollmill_grading.verdict import MEMORY, Verdict


class MathScorer:
    """1 if the final answer equals the reference, else 0. A task without an answer has no reward.

    A task's column `math` may override `extract`, `tolerance` and `units`. Its column `options` or `choices` maps
    option letters to their texts. Outcomes besides ok: `no_answer`, `hedged`, `too_long`, `too_deep`, `too_costly`,
    `timeout`, `memory`.
    """

    def __init__(self, config: MathReward, resources: RewardResources) -> None:
        self._config = config
        self._grader = MathGrader(resources.graders_for(ALGEBRA), time_limit_s=config.time_limit_s)

    def begin(self, task: Task, completion: Completion) -> Score | Awaitable[Score]:
        if task.answer is None:
            return Score(None)
        _require_text_or_number(task.answer)
        config = self._config.of_task(task.taskset, task.metadata)
        if (text := find_answer(completion)) is None:
            return Score(0.0, NO_ANSWER)
        begun = self._grader.begin(
            text,
            task.answer,
            question=task.prompt,
            options=task_options(task.metadata),
            extract=config.extract,
            tolerance=config.tolerance,
            units=config.units,
        )
        return self._score_of(begun) if isinstance(begun, Verdict) else self._score_later(begun)

    async def score(self, task: Task, completion: Completion) -> Score:
        begun = self.begin(task, completion)
        return begun if isinstance(begun, Score) else await begun

    async def _score_later(self, begun: Awaitable[Verdict]) -> Score:
        return self._score_of(await begun)

    def _score_of(self, verdict: Verdict) -> Score:
        value = self._config.timeout_reward if verdict.outcome in (TIMEOUT, MEMORY) else verdict.score
        return Score(value, verdict.outcome, verdict.queue_s, verdict.run_s)


def _require_text_or_number(answer: object) -> None:
    """Raise TypeError if a task's answer is neither text nor a number, ValueError if it is empty."""
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        kind = type(answer).__name__
        raise TypeError(f"the task's answer is {answer!r:.80} ({kind}); the math reward needs text or a number")
    if not str(answer).strip():
        raise ValueError("the task's answer is empty; give one, or null where the math reward does not apply")
