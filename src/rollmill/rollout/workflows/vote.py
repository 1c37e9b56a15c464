"""Workflows `vote` (self-consistency, arXiv:2203.11171) and `model_judged` (reward from another model's reply)."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from typing import Any

import regex

from rollmill.config.workflows import JudgedWorkflow, VoteWorkflow
from rollmill.data.content_parts import content_text
from rollmill.rewards.base import text_after
from rollmill.rollout.policy import Policy, Reply
from rollmill.rollout.workflow import RolloutScorer, WorkflowResult
from rollmill.types import Task

_PATTERN_S = 1.0
"""Timeout for finding an answer by a pattern; past it there is none."""


async def vote(config: VoteWorkflow, task: Task, policy: Policy, judge: RolloutScorer) -> WorkflowResult:
    """Sample answers and vote: with `agreement` each has a reward (arXiv:2504.16084); else the winner's counts."""
    replies = await _samples(config, task, policy)
    answers = await asyncio.to_thread(lambda: [extract_vote(config, each.completion.answer) for each in replies])
    won = majority_vote(answers)
    if config.reward == "winner":
        return await judge(replies[answers.index(won)])
    for reply, answer in zip(replies, answers, strict=True):
        policy.reward(reply, float(answer is not None and answer == won))
    return sum(answer is not None and answer == won for answer in answers) / len(answers)


def extract_vote(config: VoteWorkflow, text: str) -> str | None:
    """Extract the answer from a text, ignoring case and white space; None if there is none."""
    if config.pattern is None:
        found = text_after(text, config.after)
    else:
        try:
            matches = list(regex.finditer(config.pattern, text, concurrent=True, timeout=_PATTERN_S))
        except TimeoutError:
            return None
        found = matches[-1][1 if matches[-1].re.groups else 0] if matches else None
    return " ".join((found or "").casefold().split()) or None


def majority_vote(answers: list[str | None]) -> str | None:
    """The most frequent answer, among equals the first; None without answers."""
    counted = Counter(each for each in answers if each is not None)
    return max(counted, key=counted.__getitem__) if counted else None


async def _samples(config: VoteWorkflow, task: Task, policy: Policy) -> list[Reply]:
    if not isinstance(task.prompt, str):
        return await policy.chat_n(list(task.prompt), config.samples)
    return await policy.complete_n(task.prompt, config.samples)


_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


async def model_judged(config: JudgedWorkflow, task: Task, policy: Policy, **models: Any) -> WorkflowResult:
    """Return the last number of the judging model's reply, scaled to 0..1; None if it is missing or off the scale."""
    if isinstance(task.prompt, str):
        reply, prompt = await policy.complete(task.prompt), task.prompt
    else:
        reply, prompt = await policy.chat(list(task.prompt)), content_text(task.prompt[-1]["content"])
    places = {
        "prompt": prompt,
        "response": reply.completion.answer,
        "answer": str(task.answer),
        "scale": f"{config.scale:g}",
    }
    question = re.sub(r"\{(prompt|response|answer|scale)\}", lambda found: places[found[1]], config.question)
    verdict = await models[config.by].chat([{"role": "user", "content": question}])
    numbers = _NUMBER.findall(verdict.completion.answer)
    score = float(numbers[-1]) if numbers else -1.0
    return score / config.scale if 0 <= score <= config.scale else None
