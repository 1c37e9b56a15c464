"""Completions of one task that are compared with each other: who takes part, and who shares a verdict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

from rollmill.rewards.base import GATED, NOT_APPLICABLE, RewardResult, Score
from rollmill.rewards.judges.chat import TOO_LONG
from rollmill.rewards.judges.client import JudgeClient
from rollmill.types import Completion


async def score_distinct_texts(
    completions: Sequence[Completion],
    judged: Sequence[RewardResult],
    limit: int,
    asker: JudgeClient,
    compare: Callable[[Counter[str]], Awaitable[dict[str, Score]]],
) -> list[Score]:
    """A verdict per completion, in their order.

    `compare` gets each different text once, with the number of completions that have it, and is called where there are
    at least two completions. What a gate has stopped and what is longer than `limit` characters takes no part.
    """
    stopped = [judgement.failed_gate is not None for judgement in judged]
    too_long = [len(completion.text) > limit for completion in completions]
    playing = [not gated and not long for gated, long in zip(stopped, too_long, strict=True)]
    counts = Counter(each.text for each, plays in zip(completions, playing, strict=True) if plays)
    alone = counts.total() < 2
    found = dict.fromkeys(counts, Score(None, NOT_APPLICABLE)) if alone else await compare(counts)
    verdicts = []
    for completion, gated, plays in zip(completions, stopped, playing, strict=True):
        left_out = Score(None, GATED) if gated else asker.without(TOO_LONG)
        verdicts.append(found[completion.text] if plays else left_out)
    return verdicts
