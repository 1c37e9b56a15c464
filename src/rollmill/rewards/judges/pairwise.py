"""The pairwise judge: two responses side by side, in both orders, so that a judge's liking for a place cancels out.

Zheng et al. 2023 (arXiv:2306.05685), pairwise comparison with swapped positions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from statistics import fmean

from rollmill.config.rewards import PairwiseReward
from rollmill.core.types import Completion, Task
from rollmill.rewards.base import Judgement, Verdict
from rollmill.rewards.judges.asking import Asker, Question
from rollmill.rewards.judges.chat import TOO_LONG, UNPARSABLE, NoReplyError
from rollmill.rewards.judges.images import image_parts
from rollmill.rewards.judges.loop import together
from rollmill.rewards.judges.marking import cleaned, fresh_key
from rollmill.rewards.judges.prompts import PAIRWISE, WINNER, against, context_of, last_line, messages_of, opponent_of
from rollmill.rewards.judges.schedule import schedule
from rollmill.rewards.judges.siblings import verdicts_of
from rollmill.rewards.judges.verdict import read_winner, schema
from rollmill.rewards.resources import Resources


def pairwise(config: PairwiseReward, resources: Resources) -> AgainstReference | AgainstSiblings:
    """The reward for either opponent."""
    return (AgainstReference if config.against == "reference" else AgainstSiblings)(config, resources)


class Arena:
    """Compares two texts."""

    def __init__(self, config: PairwiseReward, resources: Resources) -> None:
        self.config, self.asker = config, Asker(config, resources)

    async def wins(self, task: Task, left: str, right: str) -> float | None:
        """The share of comparisons that `left` wins, as the mean of both orders; None where one has no verdict.

        Raises NoReplyError where the judge gives no reply.
        """
        orders = [left, right], [right, left]
        found = await together(self.asker.votes(partial(self._question, task), order) for order in orders)
        first, second = ([vote for vote in votes if vote is not None] for votes in found)
        return (fmean(first) + 1 - fmean(second)) / 2 if first and second else None

    def _question(self, task: Task, texts: list[str]) -> Question[float]:
        context = context_of(task, self.config.rubric, with_reference=self.config.against == "siblings")
        responses = {"Response A": cleaned(texts[0]), "Response B": cleaned(texts[1])}
        key = fresh_key("winner", [*context.values(), *responses.values()])
        verdict = WINNER.format(against=against(context), key=key)
        images = image_parts(task) if self.config.images else []
        return Question(
            messages_of(self.config.template or PAIRWISE, context, responses, verdict, images),
            lambda reply: read_winner(reply, key),
            last_line(verdict),
            schema(key, {"type": "string", "enum": ["A", "B", "tie"]}),
        )


class AgainstReference:
    """The share of comparisons with the task's worked solution, or its answer, that the response wins."""

    def __init__(self, config: PairwiseReward, resources: Resources) -> None:
        self._arena = Arena(config, resources)

    async def judge(self, task: Task, completion: Completion) -> Verdict:
        opponent = opponent_of(task)
        if opponent is None:
            return Verdict(None)
        asker = self._arena.asker
        if len(completion.text) > self._arena.config.response_limit:
            return asker.without(TOO_LONG)
        if completion.text == opponent:
            return Verdict(0.5)
        try:
            share = await self._arena.wins(task, completion.text, opponent)
        except NoReplyError as error:
            return asker.without(error.outcome)
        return asker.without(UNPARSABLE) if share is None else Verdict(share)

    def counters(self) -> dict[str, float]:
        """Calls, tokens and cost so far."""
        return self._arena.asker.counters()


class AgainstSiblings:
    """The share of comparisons with the other completions of the task that each wins.

    Equal texts meet once and share the result; among themselves they tie. Gated completions do not take part. A
    completion without siblings has no reward.
    """

    def __init__(self, config: PairwiseReward, resources: Resources) -> None:
        self._arena = Arena(config, resources)

    async def judge_group(
        self, task: Task, completions: Sequence[Completion], judged: Sequence[Judgement]
    ) -> list[Verdict]:
        limit, compare = self._arena.config.response_limit, partial(self._compared, task)
        return await verdicts_of(completions, judged, limit, self._arena.asker, compare)

    def counters(self) -> dict[str, float]:
        """Calls, tokens and cost so far."""
        return self._arena.asker.counters()

    async def _compared(self, task: Task, counts: Counter[str]) -> dict[str, Verdict]:
        """The verdict on each different text; `counts` says how often it occurs."""
        texts, config = sorted(counts), self._arena.config
        pairs = schedule(len(texts), config.opponents, f"{config.seed}/{task.id}")
        found = await together(self._result(task, texts[i], texts[j]) for i, j in pairs)
        games: dict[str, list[float]] = {text: [0.5] * (counts[text] - 1) for text in texts}
        missed: dict[str, str] = {}
        for (i, j), result in zip(pairs, found, strict=True):
            left, right = texts[i], texts[j]
            if isinstance(result, str):
                missed[left] = missed[right] = result
                continue
            games[left] += [result] * counts[right]
            games[right] += [1 - result] * counts[left]
        without = self._arena.asker.without
        return {text: Verdict(fmean(games[text])) if games[text] else without(missed[text]) for text in texts}

    async def _result(self, task: Task, left: str, right: str) -> float | str:
        """The left one's share of wins, or the outcome where there is none."""
        try:
            share = await self._arena.wins(task, left, right)
        except NoReplyError as error:
            return error.outcome
        return UNPARSABLE if share is None else share
