"""reasoning-gym's own scorer as a reward. Some of its scorers evaluate the answer, so it runs in a grader process."""

from __future__ import annotations

from rollmill.config.rewards import ReasoningGymReward
from rollmill.core.errors import RewardError
from rollmill.core.types import Completion, Task
from rollmill.rewards.base import OK, TIMEOUT, Verdict, tail_after
from rollmill.rewards.grader import GraderPool


class ReasoningGym:
    """The score of the generator that made the task: a number from 0 to 1, partial credit as the generator gives it.

    Outcomes besides ok: `no_answer` (the marker is missing), `timeout`, `memory`, and `unscorable` where the scorer
    raises on the answer but accepts the reference; a timeout earns the configured reward, the others 0.
    """

    def __init__(self, config: ReasoningGymReward, graders: GraderPool) -> None:
        self._config, self._graders = config, graders

    async def judge(self, task: Task, completion: Completion) -> Verdict:
        made_by, entry = task.metadata.get("reasoning_gym"), task.metadata.get("entry")
        if made_by is None or entry is None:
            raise RewardError("it was not made by a reasoning-gym generator; give taskset.generator or another reward")
        answer = tail_after(completion.text, self._config.after)
        if answer is None:
            return Verdict(0.0, "no_answer")
        if answer.strip() == entry["answer"]:
            return Verdict(1.0)
        payload = {"name": made_by["name"], "options": made_by.get("options", {}), "entry": entry}
        reply = await self._graders.ask(
            "reasoning_gym", payload | {"answer": answer.strip()}, self._config.time_limit_s
        )
        if reply.outcome != OK:
            earned = self._config.timeout_reward if reply.outcome == TIMEOUT else 0.0
            return Verdict(earned, reply.outcome, reply.queued, reply.worked)
        if isinstance(reply.value, str):
            return Verdict(0.0, reply.value, reply.queued, reply.worked)
        return Verdict(reply.value, OK, reply.queued, reply.worked)
