"""The ranking judge: ranks all completions of a task at once, numbered in random order."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from rollmill.rewards.base import RewardResult, Score
from rollmill.rewards.judges.base import LLMJudge
from rollmill.types import Completion, Task

if TYPE_CHECKING:
    from rollmill.rewards.judges.client import JudgePrompt


class RankingReward(LLMJudge):
    """Rank of the response among its siblings, from 1 (best) to 0: the judge sees and ranks all at once, without their
    reasoning."""

    places: ClassVar[tuple[str, ...]] = ("prompt", "reference", "rubric", "responses", "verdict")
    needed: ClassVar[tuple[str, ...]] = ("responses", "verdict")

    largest = 1.0
    scope = "group"
    name: Literal["ranking"]
    shuffles: int = Field(2, ge=1)
    """Number of orders in which the completions are shown; ranks are averaged. Every second order reverses the previous
    one."""

    async def score_group(
        self, task: Task, completions: Sequence[Completion], judged: Sequence[RewardResult]
    ) -> list[Score]:
        """Return scores from 1 (first place) to 0 (last), evenly spaced, averaged over orders and votes.

        Equal answers are shown once and share the mean of their places. Gated completions and those without an answer
        do not take part. A completion without siblings has no reward.
        """
        from rollmill.rewards.judges.client import score_distinct_texts

        compare = partial(self._compare, task)
        return await score_distinct_texts(completions, judged, self.response_limit, self._client, compare)

    async def _compare(self, task: Task, counts: Counter[str]) -> dict[str, Score]:
        """Return the score of each distinct text; `counts` is its number of occurrences."""
        from statistics import fmean

        from rollmill.concurrency import gather_or_cancel
        from rollmill.rewards.judges.chat import UNPARSABLE, NoReplyError

        texts = sorted(counts)
        if len(texts) == 1:
            return {texts[0]: Score(0.5)}
        source = random.Random(f"{self.seed}/{task.id}")
        orders: list[list[str]] = []
        for number in range(self.shuffles):  # each random order is followed by its reverse
            orders.append(orders[-1][::-1] if number % 2 else source.sample(texts, len(texts)))
        try:
            found = await gather_or_cancel(self._scores(task, order, counts) for order in orders)
        except NoReplyError as error:
            return dict.fromkeys(texts, self._client.without(error.outcome))
        rankings = [ranking for rankings in found for ranking in rankings]
        if not rankings:
            return dict.fromkeys(texts, self._client.without(UNPARSABLE))
        return {text: Score(fmean(ranking[text] for ranking in rankings)) for text in texts}

    async def _scores(self, task: Task, order: list[str], counts: Counter[str]) -> list[dict[str, float]]:
        """Return the scores of each vote that has a verdict."""
        votes = await self._client.votes(partial(self._prompt, task), order)
        return [scores_from_ranks([order[place] for place in vote], counts) for vote in votes if vote is not None]

    def _prompt(self, task: Task, texts: list[str]) -> JudgePrompt[list[int]]:
        from rollmill.rewards.judges import parsing, prompts
        from rollmill.rewards.judges.client import JudgePrompt

        count = len(texts)
        context = prompts.task_context(task, self.rubric)
        responses = {f"Response {number}": prompts.sanitize_text(text) for number, text in enumerate(texts, 1)}
        key = prompts.unused_json_key("ranking", [*context.values(), *responses.values()])
        basis = prompts.judging_basis(context)
        verdict = prompts.RANKING_INSTRUCTIONS.format(against=basis, key=key, count=count)
        template, images = self.template or prompts.RANKING_TEMPLATE, prompts.image_parts(task) if self.images else []
        return JudgePrompt(
            prompts.build_messages(template, context, responses, verdict, images),
            lambda reply: parsing.parse_ranking(reply, key, count),
            prompts.verdict_format(verdict),
            parsing.verdict_schema(key, {"type": "array", "items": {"type": "integer"}}),
        )


def scores_from_ranks(ranked: Sequence[str], counts: Counter[str]) -> dict[str, float]:
    """Return 1 for the first text to 0 for the last; a text that occurs several times gets the mean of its places."""
    before, last, rewards = 0, counts.total() - 1, {}
    for text in ranked:
        rewards[text] = 1 - (before + (counts[text] - 1) / 2) / last
        before += counts[text]
    return rewards
