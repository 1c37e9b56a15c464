"""Rates the difficulty of a task by a language model, from the prompt alone."""

from __future__ import annotations

from rollmill.errors import RewardError
from rollmill.rewards.judges.base import LLMJudge
from rollmill.rewards.judges.chat import NoReplyError
from rollmill.rewards.judges.client import JudgeClient, JudgePrompt
from rollmill.rewards.judges.parsing import combine_votes, parse_score, verdict_schema
from rollmill.rewards.judges.prompts import build_messages, image_parts, task_context, unused_json_key, verdict_format
from rollmill.rewards.resources import RewardResources
from rollmill.types import Task

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
    """Rates tasks with the model of a judge. Its rubric, template and scale are not used."""

    def __init__(self, config: LLMJudge, resources: RewardResources) -> None:
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
