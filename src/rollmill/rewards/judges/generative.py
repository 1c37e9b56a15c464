"""The generative judge: a language model thinks about one response and scores it.

Zheng et al. 2023 (arXiv:2306.05685), single-answer grading with a reference; Zhang et al. 2024 (arXiv:2408.15240) for
thoughts and votes.
"""

from __future__ import annotations

from functools import partial

from rollmill.config.rewards import JudgeReward, JudgeSection
from rollmill.errors import RewardError
from rollmill.rewards.base import Score
from rollmill.rewards.judges.chat import TOO_LONG, UNPARSABLE, NoReplyError
from rollmill.rewards.judges.client import JudgeClient, JudgePrompt
from rollmill.rewards.judges.parsing import combine_votes, parse_score, verdict_schema
from rollmill.rewards.judges.prompts import (
    SCORE_INSTRUCTIONS,
    SCORING_TEMPLATE,
    build_messages,
    image_parts,
    judging_basis,
    sanitize_text,
    task_context,
    unused_json_key,
    verdict_format,
)
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


# Scoring a text by a rubric of the caller's: what graders of short answers need.


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


# A language model's guess of how difficult a task is, from the prompt alone.

HARDEST = 10.0
TEMPLATE = """\
How difficult is this question? Do not answer it.

{prompt}

{verdict}"""
RATING = """\
Think step by step: what has to be known, how many steps the way to the answer has, and where one goes wrong. Then end \
with one line of JSON and nothing after it, where N is a number from 0 (anyone can answer it at once) to {hardest:g} \
(hardly an expert can):
{{"{key}": N}}"""


class DifficultyJudge:
    """Asks the model of a judge's section. Its rubric, template and scale are not used."""

    def __init__(self, config: JudgeSection, resources: RewardResources) -> None:
        self._config, self._asker = config, JudgeClient(config, resources)

    async def rate(self, task: Task) -> float | None:
        """Difficulty from 0 to 1, the mean of all votes; None where most of them have no verdict.

        Raises RewardError: the judge cannot be asked, or a column of the task is not what it has to be.
        """
        try:
            prompt = task_context(task, None, with_reference=False)["question"]
            votes = await self._asker.votes(lambda texts: self._question(task, texts[0]), [prompt])
        except NoReplyError:
            return None
        except ValueError as error:
            raise RewardError(f"task {task.id} cannot be rated: {error}") from error
        found = [vote for vote in votes if vote is not None]
        return combine_votes(found, "mean") if 2 * len(found) > len(votes) else None

    def _question(self, task: Task, prompt: str) -> JudgePrompt[float]:
        key = unused_json_key("difficulty", [prompt])
        verdict = RATING.format(hardest=HARDEST, key=key)
        images = image_parts(task) if self._config.images else []
        return JudgePrompt(
            build_messages(TEMPLATE, {"question": prompt}, {}, verdict, images),
            lambda reply: parse_score(reply, key, (0.0, HARDEST)),
            verdict_format(verdict),
            verdict_schema(key, {"type": "number"}),
        )
