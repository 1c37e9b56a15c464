"""The generative judge: a language model thinks about one response and scores it.

Zheng et al. 2023 (arXiv:2306.05685), single-answer grading with a reference; Zhang et al. 2024 (arXiv:2408.15240) for
thoughts and votes.
"""

from __future__ import annotations

from functools import partial

from rollmill.config.rewards import JudgeReward
from rollmill.rewards.base import Score
from rollmill.rewards.judges.chat import TOO_LONG, UNPARSABLE, NoReplyError
from rollmill.rewards.judges.client import JudgeClient, JudgePrompt
from rollmill.rewards.judges.images import image_parts
from rollmill.rewards.judges.parsing import combine_votes, parse_score, verdict_schema
from rollmill.rewards.judges.prompts import (
    SCORE_INSTRUCTIONS,
    SCORING_TEMPLATE,
    build_messages,
    judging_basis,
    task_context,
    verdict_format,
)
from rollmill.rewards.judges.sanitizing import sanitize_text, unused_json_key
from rollmill.rewards.resources import RewardResources
from rollmill.types import Completion, Task


class GenerativeJudge:
    """A score from 0 to 1. Without a verdict in most of the votes the outcome is `unparsable`."""

    def __init__(self, config: JudgeReward, resources: RewardResources) -> None:
        self._config, self._asker = config, JudgeClient(config, resources)

    async def judge(self, task: Task, completion: Completion) -> Score:
        return await self.grade(task, completion.text)

    async def grade(self, task: Task, text: str, rubric: str | None = None) -> Score:
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
        return Score(combine_votes(scores, self._config.combine))

    def counters(self) -> dict[str, float]:
        """Calls, tokens and cost so far."""
        return self._asker.counters()

    def _question(self, task: Task, rubric: str | None, texts: list[str]) -> JudgePrompt[float]:
        config, scale = self._config, self._config.scale
        context = task_context(task, config.rubric)
        if rubric is not None:
            context["rubric"] = sanitize_text(rubric)
        response = sanitize_text(texts[0])
        key = unused_json_key("score", [*context.values(), response])
        verdict = SCORE_INSTRUCTIONS.format(against=judging_basis(context), low=scale[0], high=scale[1], key=key)
        images = image_parts(task) if config.images else []
        return JudgePrompt(
            build_messages(config.template or SCORING_TEMPLATE, context, {"The response": response}, verdict, images),
            lambda reply: parse_score(reply, key, scale),
            verdict_format(verdict),
            verdict_schema(key, {"type": "number"}),
        )
