"""The generative judge: a language model thinks about one response and scores it.

Zheng et al. 2023 (arXiv:2306.05685), single-answer grading with a reference; Zhang et al. 2024 (arXiv:2408.15240) for
thoughts and votes.
"""

from __future__ import annotations

from functools import partial

from rollmill.config.rewards import JudgeReward
from rollmill.core.types import Completion, Task
from rollmill.rewards.base import Verdict
from rollmill.rewards.judges.asking import Asker, Question
from rollmill.rewards.judges.chat import TOO_LONG, UNPARSABLE, NoReplyError
from rollmill.rewards.judges.images import image_parts
from rollmill.rewards.judges.marking import cleaned, fresh_key
from rollmill.rewards.judges.prompts import JUDGE, SCORE, against, context_of, last_line, messages_of
from rollmill.rewards.judges.verdict import combined, read_score, schema
from rollmill.rewards.resources import Resources


class Generative:
    """A score from 0 to 1. Without a verdict in most of the votes the outcome is `unparsable`."""

    def __init__(self, config: JudgeReward, resources: Resources) -> None:
        self._config, self._asker = config, Asker(config, resources)

    async def judge(self, task: Task, completion: Completion) -> Verdict:
        return await self.grade(task, completion.text)

    async def grade(self, task: Task, text: str, rubric: str | None = None) -> Verdict:
        """Judge any text as a response to a task. `rubric` comes before the task's own and the configured one."""
        if len(text) > self._config.response_limit:
            return self._asker.without(TOO_LONG)
        try:
            found = await self._asker.votes(partial(self._question, task, rubric), [text])
        except NoReplyError as error:
            return self._asker.without(error.outcome)
        scores = [score for score in found if score is not None]
        if 2 * len(scores) <= len(found):
            return self._asker.without(UNPARSABLE)
        return Verdict(combined(scores, self._config.combine))

    def counters(self) -> dict[str, float]:
        """Calls, tokens and cost so far."""
        return self._asker.counters()

    def _question(self, task: Task, rubric: str | None, texts: list[str]) -> Question[float]:
        config, scale = self._config, self._config.scale
        context = context_of(task, config.rubric)
        if rubric is not None:
            context["rubric"] = cleaned(rubric)
        response = cleaned(texts[0])
        key = fresh_key("score", [*context.values(), response])
        verdict = SCORE.format(against=against(context), low=scale[0], high=scale[1], key=key)
        images = image_parts(task) if config.images else []
        return Question(
            messages_of(config.template or JUDGE, context, {"The response": response}, verdict, images),
            lambda reply: read_score(reply, key, scale),
            last_line(verdict),
            schema(key, {"type": "number"}),
        )
