"""A language model's guess of how difficult a task is, from the prompt alone."""

from __future__ import annotations

from rollmill.config.rewards import JudgeSection
from rollmill.core.errors import RewardError
from rollmill.core.types import Task
from rollmill.rewards.judges.asking import Asker, Question
from rollmill.rewards.judges.chat import NoReplyError
from rollmill.rewards.judges.images import image_parts
from rollmill.rewards.judges.marking import fresh_key
from rollmill.rewards.judges.prompts import context_of, last_line, messages_of
from rollmill.rewards.judges.verdict import combined, read_score, schema
from rollmill.rewards.resources import Resources

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

    def __init__(self, config: JudgeSection, resources: Resources) -> None:
        self._config, self._asker = config, Asker(config, resources)

    async def rate(self, task: Task) -> float | None:
        """Difficulty from 0 to 1, the mean of all votes; None where most of them have no verdict.

        Raises RewardError: the judge cannot be asked, or a column of the task is not what it has to be.
        """
        try:
            prompt = context_of(task, None, with_reference=False)["question"]
            votes = await self._asker.votes(lambda texts: self._question(task, texts[0]), [prompt])
        except NoReplyError:
            return None
        except ValueError as error:
            raise RewardError(f"task {task.id} cannot be rated: {error}") from error
        found = [vote for vote in votes if vote is not None]
        return combined(found, "mean") if 2 * len(found) > len(votes) else None

    def _question(self, task: Task, prompt: str) -> Question[float]:
        key = fresh_key("difficulty", [prompt])
        verdict = RATING.format(hardest=HARDEST, key=key)
        images = image_parts(task) if self._config.images else []
        return Question(
            messages_of(TEMPLATE, {"question": prompt}, {}, verdict, images),
            lambda reply: read_score(reply, key, (0.0, HARDEST)),
            last_line(verdict),
            schema(key, {"type": "number"}),
        )
