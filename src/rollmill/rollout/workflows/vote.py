"""Workflow `vote`: the most frequent of several answers wins (self-consistency, arXiv:2203.11171)."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING, ClassVar, Literal, Self

import regex
from pydantic import Field, model_validator

from rollmill.config.workflows import WorkflowSection
from rollmill.rewards.base import text_after
from rollmill.types import Task

if TYPE_CHECKING:
    from rollmill.rollout.policy import Policy
    from rollmill.rollout.workflow import RolloutScorer, WorkflowResult

_PATTERN_S = 1.0
"""Timeout for finding an answer by a pattern; past it there is none."""


class VoteWorkflow(WorkflowSection):
    """Several answers to the task, each a separate experience; the most frequent one wins (arXiv:2203.11171)."""

    multi_step: ClassVar[bool] = True

    name: Literal["vote"] = "vote"
    samples: int = Field(8, ge=2)
    """Answers per rollout."""
    pattern: str | None = None
    """Regular expression of the answer in the text: its last match, or that match's first group. A text that takes
    longer than a second to search has no answer."""
    after: str | None = None
    """Alternative to `pattern`: the answer is the text after the last occurrence of this text. Default: the whole
    text."""
    reward: Literal["agreement", "winner"] = "agreement"
    """`agreement` needs no labels: each sample with the winning answer earns 1, others 0 (arXiv:2504.16084). `winner`:
    the winning answer is scored by `rewards`, and all samples share its reward."""

    @property
    def scored_by_rewards(self) -> bool:
        return self.reward == "winner"

    @model_validator(mode="after")
    def _one_extraction(self) -> Self:
        if self.pattern is not None and self.after is not None:
            raise ValueError("pattern and after both say where the answer is; give one of them")
        try:
            regex.compile(self.pattern or "")
        except (regex.error, RecursionError) as error:
            raise ValueError(f"pattern: not a regular expression: {error}") from error
        return self

    async def solve(self, task: Task, policy: Policy, judge: RolloutScorer) -> WorkflowResult:
        """Sample answers and vote; with `agreement` return the share of the winner."""
        if isinstance(task.prompt, str):
            replies = await policy.complete_n(task.prompt, self.samples)
        else:
            replies = await policy.chat_n(list(task.prompt), self.samples)
        answers = await asyncio.to_thread(lambda: [self.extract(each.completion.answer) for each in replies])
        won = majority_vote(answers)
        if self.reward == "winner":
            return await judge(replies[answers.index(won)])
        for reply, answer in zip(replies, answers, strict=True):
            policy.reward(reply, float(answer is not None and answer == won))
        return sum(answer is not None and answer == won for answer in answers) / len(answers)

    def extract(self, text: str) -> str | None:
        """Extract the answer from a text, ignoring case and white space; None if there is none."""
        if self.pattern is None:
            found = text_after(text, self.after)
        else:
            try:
                matches = list(regex.finditer(self.pattern, text, concurrent=True, timeout=_PATTERN_S))
            except TimeoutError:
                return None
            found = matches[-1][1 if matches[-1].re.groups else 0] if matches else None
        return " ".join((found or "").casefold().split()) or None


def majority_vote(answers: list[str | None]) -> str | None:
    """The most frequent answer, among equals the first; None without answers."""
    counted = Counter(each for each in answers if each is not None)
    return max(counted, key=counted.__getitem__) if counted else None
