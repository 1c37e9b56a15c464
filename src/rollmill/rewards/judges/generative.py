"""The generative judge: a language model reasons about one response and scores it.

Zheng et al. 2023 (arXiv:2306.05685), single-answer grading with a reference; Zhang et al. 2024 (arXiv:2408.15240) for
reasoning and votes.
"""

from __future__ import annotations

from functools import partial

from rollmill.config.rewards.judges import JudgeReward, JudgeSection
from rollmill.errors import RewardError
from rollmill.rewards.base import NO_ANSWER, Score, find_answer
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
    """A score from 0 to 1 of the answer. If most votes have no verdict, the outcome is `unparsable`."""

    def __init__(self, config: JudgeReward, resources: RewardResources) -> None:
        self._config, self._client = config, JudgeClient(config, resources)

    async def score(self, task: Task, completion: Completion) -> Score:
        answer = find_answer(completion)
        return Score(0.0, NO_ANSWER) if answer is None else await self.grade(task, answer)

    async def grade(self, task: Task, text: str, rubric: str | None = None) -> Score:
        """Score any text as a response to a task. `rubric` overrides the task's and the configured one."""
        if len(text) > self._config.response_limit:
            return self._client.without(TOO_LONG)
        try:
            found = await self._client.votes(partial(self._prompt, task, rubric), [text])
        except NoReplyError as error:
            return self._client.without(error.outcome)
        scores = [score for score in found if score is not None]
        if 2 * len(scores) <= len(found):
            return self._client.without(UNPARSABLE)
        return Score(combine_votes(scores, self._config.combine))

    def counters(self) -> dict[str, float]:
        """Return calls, tokens and cost so far."""
        return self._client.counters()

    def _prompt(self, task: Task, rubric: str | None, texts: list[str]) -> JudgePrompt[float]:
        config, scale = self._config, self._config.scale
        context = task_context(task, config.rubric)
        if rubric is not None:
            context["rubric"] = sanitize_text(rubric)
        response = sanitize_text(texts[0])
        shown = [*context.values(), response]
        key = unused_json_key("score", shown)
        verdict = SCORE_INSTRUCTIONS.format(against=judging_basis(context), low=scale[0], high=scale[1], key=key)
        images = image_parts(task) if config.images else []
        return JudgePrompt(
            build_messages(config.template or SCORING_TEMPLATE, context, {"The response": response}, verdict, images),
            lambda reply: parse_score(reply, key, scale, shown),
            verdict_format(verdict),
            verdict_schema(key, {"type": "number"}),
        )


# Scores a text by a rubric of the caller, for graders of short answers.


class RubricJudge:
    """A generative judge that returns one number."""

    def __init__(self, config: JudgeReward, resources: RewardResources) -> None:
        self._judge = GenerativeJudge(config, resources)

    async def score(self, task: Task, text: str, rubric: str) -> float:
        """Return a score from 0 to 1 for a text by a rubric.

        It is `unparsable_reward` or `timeout_reward` if the judge gives no verdict. Raises RewardError if the judge
        cannot be called, ValueError if the task's data are wrong.
        """
        value = (await self._judge.grade(task, text, rubric)).value
        assert isinstance(value, float)
        return value

    def counters(self) -> dict[str, float]:
        """Return calls, tokens and cost so far."""
        return self._judge.counters()


# Rates the difficulty of a task by a language model, from the prompt alone.

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
    """Rates tasks with the model of a judge's section. Its rubric, template and scale are not used."""

    def __init__(self, config: JudgeSection, resources: RewardResources) -> None:
        self._config, self._client = config, JudgeClient(config, resources)

    async def rate(self, task: Task) -> float | None:
        """Return the difficulty from 0 to 1, the mean of all votes; None if most of them have no verdict.

        Raises RewardError if the judge cannot be called, or a column of the task is invalid.
        """
        try:
            prompt = task_context(task, None, with_reference=False)["question"]
            votes = await self._client.votes(lambda texts: self._prompt(task, texts[0]), [prompt])
        except NoReplyError:
            return None
        except ValueError as error:
            raise RewardError(f"task {task.id} cannot be rated: {error}") from error
        found = [vote for vote in votes if vote is not None]
        return combine_votes(found, "mean") if 2 * len(found) > len(votes) else None

    def _prompt(self, task: Task, prompt: str) -> JudgePrompt[float]:
        key = unused_json_key("difficulty", [prompt])
        verdict = RATING.format(hardest=HARDEST, key=key)
        images = image_parts(task) if self._config.images else []
        return JudgePrompt(
            build_messages(TEMPLATE, {"question": prompt}, {}, verdict, images),
            lambda reply: parse_score(reply, key, (0.0, HARDEST), [prompt]),
            verdict_format(verdict),
            verdict_schema(key, {"type": "number"}),
        )
