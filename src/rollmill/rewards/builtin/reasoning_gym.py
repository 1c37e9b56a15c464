"""The reward of reasoning-gym's own scorers. Some of them evaluate the answer, so they run in a grader process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from rollmill.config.rewards import Reward
from rollmill.errors import RewardError
from rollmill.rewards.base import NO_ANSWER, OK, TIMEOUT, Score, find_answer
from rollmill.types import Completion, Task

if TYPE_CHECKING:
    from rollmill.rewards.resources import RewardResources
    from rollmill_grading.grader_pool import GraderPool


class ReasoningGymReward(Reward):
    """The score of reasoning-gym's own scorer for the answer, without reasoning. Only for tasks of a `generator`."""

    needs_extra = ("reasoning", "reasoning_gym")
    decides = True
    largest = 1.0
    needs_generator = True
    name: Literal["reasoning_gym"]
    after: str | None = None
    """Score only what follows the last occurrence of this text."""
    time_limit_s: float = Field(10.0, gt=0)
    """Timeout of one answer; the grader process is then killed and the outcome is `timeout`."""
    _graders: GraderPool

    def setup(self, resources: RewardResources) -> None:
        self._graders = resources.graders

    async def score(self, task: Task, completion: Completion) -> Score:
        """Return the score from the task's generator: a number from 0 to 1, with the generator's partial credit.

        Outcomes besides ok: `no_answer` (the marker is missing, or the reasoning unfinished), `timeout`, `memory`, and
        `unscorable` if the scorer raises on the answer but accepts the reference; a timeout earns `timeout_reward`,
        the others 0.
        """
        from rollmill.rewards.worker_functions import REASONING_GYM

        made_by, entry = task.metadata.get("reasoning_gym"), task.metadata.get("entry")
        if made_by is None or entry is None:
            raise RewardError("it was not made by a reasoning-gym generator; give taskset.generator or another reward")
        answer = find_answer(completion, self.after)
        if answer is None:
            return Score(0.0, NO_ANSWER)
        if answer.strip() == entry["answer"]:
            return Score(1.0)
        payload = {"name": made_by["name"], "options": made_by.get("options", {}), "entry": entry}
        reply = await self._graders.ask(REASONING_GYM, payload | {"answer": answer.strip()}, self.time_limit_s)
        if reply.outcome != OK:
            earned = self.timeout_reward if reply.outcome == TIMEOUT else 0.0
            return Score(earned, reply.outcome, reply.queue_s, reply.run_s)
        if isinstance(reply.value, str):
            return Score(0.0, reply.value, reply.queue_s, reply.run_s)
        return Score(reply.value, OK, reply.queue_s, reply.run_s)
