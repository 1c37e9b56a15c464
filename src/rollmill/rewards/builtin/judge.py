"""The LLM judge: a language model reasons about one response and scores it.

Zheng et al. 2023 (arXiv:2306.05685), single-answer grading with a reference; Zhang et al. 2024 (arXiv:2408.15240) for
reasoning and votes.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from pydantic import model_validator

from rollmill.rewards.base import NO_ANSWER, Score, find_answer
from rollmill.rewards.judges.base import LLMJudge
from rollmill.types import Completion, Task

if TYPE_CHECKING:
    from rollmill.rewards.judges.client import JudgePrompt


class JudgeReward(LLMJudge):
    """LLM judge: scores the response, without its reasoning, from 0 to 1. The judge reasons first, then ends with a
    verdict in JSON."""

    places: ClassVar[tuple[str, ...]] = ("prompt", "reference", "rubric", "response", "verdict")
    needed: ClassVar[tuple[str, ...]] = ("response", "verdict")

    largest = 1.0
    name: Literal["judge"]
    scale: tuple[float, float] = (0.0, 10.0)
    """Lowest and highest score of the judge, mapped to 0 and 1. Scores outside this range are invalid."""
    combine: Literal["mean", "median", "majority"] = "mean"
    """Aggregation of several votes. `majority` is the most frequent score, or the mean of ties."""

    @model_validator(mode="after")
    def _scale_rises(self) -> Self:
        if self.scale[0] >= self.scale[1]:
            raise ValueError(f"scale: the lower end {self.scale[0]:g} is not below the upper {self.scale[1]:g}")
        return self

    async def score(self, task: Task, completion: Completion) -> Score:
        answer = find_answer(completion)
        return Score(0.0, NO_ANSWER) if answer is None else await self.grade(task, answer)

    async def grade(self, task: Task, text: str, rubric: str | None = None) -> Score:
        """Score any text as a response to a task. `rubric` overrides the task's and the configured one.

        If most votes have no verdict, the outcome is `unparsable`. Raises RewardError if the judge cannot be called,
        ValueError if the task's data are wrong.
        """
        from rollmill.rewards.judges.chat import TOO_LONG, UNPARSABLE, NoReplyError
        from rollmill.rewards.judges.parsing import combine_votes

        if len(text) > self.response_limit:
            return self._client.without(TOO_LONG)
        try:
            found = await self._client.votes(partial(self._prompt, task, rubric), [text])
        except NoReplyError as error:
            return self._client.without(error.outcome)
        scores = [score for score in found if score is not None]
        if 2 * len(scores) <= len(found):
            return self._client.without(UNPARSABLE)
        return Score(combine_votes(scores, self.combine))

    def _prompt(self, task: Task, rubric: str | None, texts: list[str]) -> JudgePrompt[float]:
        from rollmill.rewards.judges import parsing, prompts
        from rollmill.rewards.judges.client import JudgePrompt

        low, high = self.scale
        context = prompts.task_context(task, self.rubric)
        if rubric is not None:
            context["rubric"] = prompts.sanitize_text(rubric)
        response = prompts.sanitize_text(texts[0])
        shown = [*context.values(), response]
        key = prompts.unused_json_key("score", shown)
        basis = prompts.judging_basis(context)
        verdict = prompts.SCORE_INSTRUCTIONS.format(against=basis, low=low, high=high, key=key)
        template, images = self.template or prompts.SCORING_TEMPLATE, prompts.image_parts(task) if self.images else []
        return JudgePrompt(
            prompts.build_messages(template, context, {"The response": response}, verdict, images),
            lambda reply: parsing.parse_score(reply, key, (low, high), shown),
            prompts.verdict_format(verdict),
            parsing.verdict_schema(key, {"type": "number"}),
        )
