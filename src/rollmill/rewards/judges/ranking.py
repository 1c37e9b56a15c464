"""The ranking judge: ranks all completions of a task at once, numbered in random order."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from functools import partial
from statistics import fmean

from rollmill.config.rewards.judges import RankingReward
from rollmill.rewards.base import RewardResult, Score
from rollmill.rewards.function_threads import gather_or_cancel
from rollmill.rewards.judges.chat import UNPARSABLE, NoReplyError
from rollmill.rewards.judges.client import JudgeClient, JudgePrompt, score_distinct_texts
from rollmill.rewards.judges.parsing import parse_ranking, verdict_schema
from rollmill.rewards.judges.prompts import (
    RANKING_INSTRUCTIONS,
    RANKING_TEMPLATE,
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


class RankingJudge:
    """A score from 1 (first place) to 0 (last), evenly spaced, averaged over orders and votes.

    Equal answers are shown once and share the mean of their places. Gated completions and those without an answer do
    not take part. A completion without siblings has no reward.
    """

    def __init__(self, config: RankingReward, resources: RewardResources) -> None:
        self._config, self._client = config, JudgeClient(config, resources)

    async def score_group(
        self, task: Task, completions: Sequence[Completion], judged: Sequence[RewardResult]
    ) -> list[Score]:
        limit, compare = self._config.response_limit, partial(self._compare, task)
        return await score_distinct_texts(completions, judged, limit, self._client, compare)

    def counters(self) -> dict[str, float]:
        """Return calls, tokens and cost so far."""
        return self._client.counters()

    async def _compare(self, task: Task, counts: Counter[str]) -> dict[str, Score]:
        """Return the score of each distinct text; `counts` is its number of occurrences."""
        texts = sorted(counts)
        if len(texts) == 1:
            return {texts[0]: Score(0.5)}
        try:
            found = await gather_or_cancel(self._scores(task, order, counts) for order in self._orders(task, texts))
        except NoReplyError as error:
            return dict.fromkeys(texts, self._client.without(error.outcome))
        rankings = [ranking for rankings in found for ranking in rankings]
        if not rankings:
            return dict.fromkeys(texts, self._client.without(UNPARSABLE))
        return {text: Score(fmean(ranking[text] for ranking in rankings)) for text in texts}

    def _orders(self, task: Task, texts: list[str]) -> list[list[str]]:
        """Return the orders in which the texts are shown: each random one is followed by its reverse."""
        source = random.Random(f"{self._config.seed}/{task.id}")
        orders: list[list[str]] = []
        for number in range(self._config.shuffles):
            orders.append(orders[-1][::-1] if number % 2 else source.sample(texts, len(texts)))
        return orders

    async def _scores(self, task: Task, order: list[str], counts: Counter[str]) -> list[dict[str, float]]:
        """Return the scores of each vote that has a verdict."""
        votes = await self._client.votes(partial(self._prompt, task), order)
        return [scores_from_ranks([order[place] for place in vote], counts) for vote in votes if vote is not None]

    def _prompt(self, task: Task, texts: list[str]) -> JudgePrompt[list[int]]:
        config, count = self._config, len(texts)
        context = task_context(task, config.rubric)
        responses = {f"Response {number}": sanitize_text(text) for number, text in enumerate(texts, 1)}
        key = unused_json_key("ranking", [*context.values(), *responses.values()])
        verdict = RANKING_INSTRUCTIONS.format(against=judging_basis(context), key=key, count=count)
        images = image_parts(task) if config.images else []
        return JudgePrompt(
            build_messages(config.template or RANKING_TEMPLATE, context, responses, verdict, images),
            lambda reply: parse_ranking(reply, key, count),
            verdict_format(verdict),
            verdict_schema(key, {"type": "array", "items": {"type": "integer"}}),
        )


def scores_from_ranks(ranked: Sequence[str], counts: Counter[str]) -> dict[str, float]:
    """Return 1 for the first text to 0 for the last; a text that occurs several times gets the mean of its places."""
    before, last, rewards = 0, counts.total() - 1, {}
    for text in ranked:
        rewards[text] = 1 - (before + (counts[text] - 1) / 2) / last
        before += counts[text]
    return rewards
