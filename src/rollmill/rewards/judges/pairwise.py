"""The pairwise judge: compares two responses in both orders, so that position bias cancels out.

Zheng et al. 2023 (arXiv:2306.05685), pairwise comparison with swapped positions.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from functools import partial
from itertools import combinations
from statistics import fmean

from rollmill.config.rewards.judges import PairwiseReward
from rollmill.rewards.base import NO_ANSWER, RewardResult, Score, find_answer
from rollmill.rewards.function_threads import gather_or_cancel
from rollmill.rewards.judges.chat import TOO_LONG, UNPARSABLE, NoReplyError
from rollmill.rewards.judges.client import JudgeClient, JudgePrompt, score_distinct_texts
from rollmill.rewards.judges.parsing import parse_winner, verdict_schema
from rollmill.rewards.judges.prompts import (
    PAIRWISE_TEMPLATE,
    WINNER_INSTRUCTIONS,
    build_messages,
    image_parts,
    judging_basis,
    sanitize_text,
    task_context,
    task_opponent,
    unused_json_key,
    verdict_format,
)
from rollmill.rewards.resources import RewardResources
from rollmill.types import Completion, Task

# Pairings of sibling completions for the pairwise judge.


def pair_opponents(count: int, opponents: int | None, seed: str) -> list[tuple[int, int]]:
    """Return pairs (i, j) with i < j of `count` players, such that each meets `opponents` others; None: all.

    The players are placed on a random circle, and each meets the nearest on both sides; if the number is odd, also the
    opposite one. (With odd `count` and odd `opponents` one player meets one more.)
    """
    if opponents is None or opponents >= count - 1:
        return list(combinations(range(count), 2))
    circle = list(range(count))
    random.Random(seed).shuffle(circle)
    steps = [(i, i + step) for step in range(1, opponents // 2 + 1) for i in range(count)]
    if opponents % 2:
        steps += [(i, i + count // 2) for i in range((count + 1) // 2)]
    pairs = {tuple(sorted((circle[i], circle[j % count]))) for i, j in steps}
    return sorted((pair[0], pair[1]) for pair in pairs)


def build_pairwise_judge(
    config: PairwiseReward, resources: RewardResources
) -> PairwiseReferenceJudge | PairwiseGroupJudge:
    """Build the reward for either type of opponent."""
    return (PairwiseReferenceJudge if config.against == "reference" else PairwiseGroupJudge)(config, resources)


class PairwiseComparer:
    """Compares two texts."""

    def __init__(self, config: PairwiseReward, resources: RewardResources) -> None:
        self.config, self.client = config, JudgeClient(config, resources)

    async def win_rate(self, task: Task, left: str, right: str) -> float | None:
        """Return the share of comparisons that `left` wins, averaged over both orders; None if one has no verdict.

        Raises NoReplyError if the judge gives no reply.
        """
        orders = [left, right], [right, left]
        found = await gather_or_cancel(self.client.votes(partial(self._prompt, task), order) for order in orders)
        first, second = ([vote for vote in votes if vote is not None] for votes in found)
        return (fmean(first) + 1 - fmean(second)) / 2 if first and second else None

    def _prompt(self, task: Task, texts: list[str]) -> JudgePrompt[float]:
        context = task_context(task, self.config.rubric, with_reference=self.config.against == "siblings")
        responses = {"Response A": sanitize_text(texts[0]), "Response B": sanitize_text(texts[1])}
        shown = [*context.values(), *responses.values()]
        key = unused_json_key("winner", shown)
        verdict = WINNER_INSTRUCTIONS.format(against=judging_basis(context), key=key)
        images = image_parts(task) if self.config.images else []
        return JudgePrompt(
            build_messages(self.config.template or PAIRWISE_TEMPLATE, context, responses, verdict, images),
            lambda reply: parse_winner(reply, key, shown),
            verdict_format(verdict),
            verdict_schema(key, {"type": "string", "enum": ["A", "B", "tie"]}),
        )


class PairwiseReferenceJudge:
    """The win rate of a response against the task's worked solution, or its answer."""

    def __init__(self, config: PairwiseReward, resources: RewardResources) -> None:
        self._comparer = PairwiseComparer(config, resources)

    async def score(self, task: Task, completion: Completion) -> Score:
        opponent = task_opponent(task)
        if opponent is None:
            return Score(None)
        client = self._comparer.client
        answer = find_answer(completion)
        if answer is None:
            return Score(0.0, NO_ANSWER)
        if len(answer) > self._comparer.config.response_limit:
            return client.without(TOO_LONG)
        if answer == opponent:
            return Score(0.5)
        try:
            share = await self._comparer.win_rate(task, answer, opponent)
        except NoReplyError as error:
            return client.without(error.outcome)
        return client.without(UNPARSABLE) if share is None else Score(share)

    def counters(self) -> dict[str, float]:
        """Return calls, tokens and cost so far."""
        return self._comparer.client.counters()


class PairwiseGroupJudge:
    """The win rate of each completion against the other completions of the task.

    Equal answers are compared once and share the result; among themselves they tie. Gated completions and those without
    an answer do not take part. A completion without siblings has no reward.
    """

    def __init__(self, config: PairwiseReward, resources: RewardResources) -> None:
        self._comparer = PairwiseComparer(config, resources)

    async def score_group(
        self, task: Task, completions: Sequence[Completion], judged: Sequence[RewardResult]
    ) -> list[Score]:
        limit, compare = self._comparer.config.response_limit, partial(self._compare, task)
        return await score_distinct_texts(completions, judged, limit, self._comparer.client, compare)

    def counters(self) -> dict[str, float]:
        """Return calls, tokens and cost so far."""
        return self._comparer.client.counters()

    async def _compare(self, task: Task, counts: Counter[str]) -> dict[str, Score]:
        """Return the score of each distinct text; `counts` is its number of occurrences."""
        texts, config = sorted(counts), self._comparer.config
        pairs = pair_opponents(len(texts), config.opponents, f"{config.seed}/{task.id}")
        found = await gather_or_cancel(self._result(task, texts[i], texts[j]) for i, j in pairs)
        games: dict[str, list[float]] = {text: [0.5] * (counts[text] - 1) for text in texts}
        missed: dict[str, str] = {}
        for (i, j), result in zip(pairs, found, strict=True):
            left, right = texts[i], texts[j]
            if isinstance(result, str):
                missed[left] = missed[right] = result
                continue
            games[left] += [result] * counts[right]
            games[right] += [1 - result] * counts[left]
        without = self._comparer.client.without
        return {text: Score(fmean(games[text])) if games[text] else without(missed[text]) for text in texts}

    async def _result(self, task: Task, left: str, right: str) -> float | str:
        """Return the win rate of `left`, or the outcome if there is none."""
        try:
            share = await self._comparer.win_rate(task, left, right)
        except NoReplyError as error:
            return error.outcome
        return UNPARSABLE if share is None else share
