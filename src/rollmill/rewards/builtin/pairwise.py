"""The pairwise judge: compares two responses in both orders, so that position bias cancels out.

Zheng et al. 2023 (arXiv:2306.05685), pairwise comparison with swapped positions.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from functools import partial
from itertools import combinations
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from pydantic import Field, model_validator

from rollmill.rewards.base import NO_ANSWER, RewardResult, Score, find_answer
from rollmill.rewards.judges.base import LLMJudge
from rollmill.types import Completion, Task

if TYPE_CHECKING:
    from rollmill.rewards.judges.client import JudgePrompt


class PairwiseReward(LLMJudge):
    """Fraction of comparisons that the response, without its reasoning, wins, from 0 to 1. Each is made in both orders;
    ties count half."""

    places: ClassVar[tuple[str, ...]] = ("prompt", "reference", "rubric", "responses", "verdict")
    needed: ClassVar[tuple[str, ...]] = ("responses", "verdict")

    largest = 1.0
    name: Literal["pairwise"]
    against: Literal["siblings", "reference"] = "siblings"
    """Compare with the other completions of the task, or with its worked solution (without one, its answer)."""
    opponents: int | None = Field(None, ge=1)
    """Number of siblings to compare each completion with, chosen at random by `seed`; null: all."""

    @model_validator(mode="after")
    def _opponents_are_siblings(self) -> Self:
        if self.opponents is not None and self.against == "reference":
            raise ValueError("opponents is honoured with against: siblings; remove it")
        return self

    @property
    def scope(self) -> Literal["completion", "group"]:  # type: ignore[override]
        return "group" if self.against == "siblings" else "completion"

    async def score(self, task: Task, completion: Completion) -> Score:
        """Return the win rate of a response against the task's worked solution, or its answer."""
        from rollmill.rewards.judges.chat import TOO_LONG
        from rollmill.rewards.judges.prompts import task_opponent

        opponent = task_opponent(task)
        if opponent is None:
            return Score(None)
        answer = find_answer(completion)
        if answer is None:
            return Score(0.0, NO_ANSWER)
        if len(answer) > self.response_limit:
            return self._client.without(TOO_LONG)
        if answer == opponent:
            return Score(0.5)
        rate = await self._win_rate(task, answer, opponent)
        return self._client.without(rate) if isinstance(rate, str) else Score(rate)

    async def score_group(
        self, task: Task, completions: Sequence[Completion], judged: Sequence[RewardResult]
    ) -> list[Score]:
        """Return the win rate of each completion against the other completions of the task.

        Equal answers are compared once and share the result; among themselves they tie. Gated completions and those
        without an answer do not take part. A completion without siblings has no reward.
        """
        from rollmill.rewards.judges.client import score_distinct_texts

        compare = partial(self._compare, task)
        return await score_distinct_texts(completions, judged, self.response_limit, self._client, compare)

    async def _compare(self, task: Task, counts: Counter[str]) -> dict[str, Score]:
        """Return the score of each distinct text; `counts` is its number of occurrences."""
        from statistics import fmean

        from rollmill.concurrency import gather_or_cancel

        texts = sorted(counts)
        pairs = pair_opponents(len(texts), self.opponents, f"{self.seed}/{task.id}")
        found = await gather_or_cancel(self._win_rate(task, texts[i], texts[j]) for i, j in pairs)
        games: dict[str, list[float]] = {text: [0.5] * (counts[text] - 1) for text in texts}
        missed: dict[str, str] = {}
        for (i, j), result in zip(pairs, found, strict=True):
            left, right = texts[i], texts[j]
            if isinstance(result, str):
                missed[left] = missed[right] = result
                continue
            games[left] += [result] * counts[right]
            games[right] += [1 - result] * counts[left]
        without = self._client.without
        return {text: Score(fmean(games[text])) if games[text] else without(missed[text]) for text in texts}

    async def _win_rate(self, task: Task, left: str, right: str) -> float | str:
        """Return the share of comparisons that `left` wins, averaged over both orders; the outcome if one has no
        verdict."""
        from statistics import fmean

        from rollmill.concurrency import gather_or_cancel
        from rollmill.rewards.judges.chat import UNPARSABLE, NoReplyError

        orders = [left, right], [right, left]
        try:
            found = await gather_or_cancel(self._client.votes(partial(self._prompt, task), order) for order in orders)
        except NoReplyError as error:
            return error.outcome
        first, second = ([vote for vote in votes if vote is not None] for votes in found)
        return (fmean(first) + 1 - fmean(second)) / 2 if first and second else UNPARSABLE

    def _prompt(self, task: Task, texts: list[str]) -> JudgePrompt[float]:
        from rollmill.rewards.judges import parsing, prompts
        from rollmill.rewards.judges.client import JudgePrompt

        context = prompts.task_context(task, self.rubric, with_reference=self.against == "siblings")
        responses = {
            "Response A": prompts.sanitize_text(texts[0]),
            "Response B": prompts.sanitize_text(texts[1]),
        }
        shown = [*context.values(), *responses.values()]
        key = prompts.unused_json_key("winner", shown)
        verdict = prompts.WINNER_INSTRUCTIONS.format(against=prompts.judging_basis(context), key=key)
        template, images = self.template or prompts.PAIRWISE_TEMPLATE, prompts.image_parts(task) if self.images else []
        return JudgePrompt(
            prompts.build_messages(template, context, responses, verdict, images),
            lambda reply: parsing.parse_winner(reply, key, shown),
            prompts.verdict_format(verdict),
            parsing.verdict_schema(key, {"type": "string", "enum": ["A", "B", "tie"]}),
        )


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
