"""Workflow `reflection`: answer, be told of errors, think, answer again (after Reflexion, arXiv:2303.11366)."""

from __future__ import annotations

from rollmill.config.workflows import ReflectionWorkflow
from rollmill.errors import ContextLengthError
from rollmill.rewards import RewardResult
from rollmill.rollout.policy import Policy, PolicyConversation
from rollmill.rollout.workflow import RolloutScorer, WorkflowResult
from rollmill.types import Task

RETRIES_METRIC = "retries"
"""The reward part with the cost of retries."""


async def reflection(config: ReflectionWorkflow, task: Task, policy: Policy, judge: RolloutScorer) -> WorkflowResult:
    """Return the rewards of the last answer, discounted for each retry."""
    dialogue = PolicyConversation.of_task(policy, task)
    reply, taken = await dialogue.ask(), 0
    judgement = await judge(reply) if config.critic == "rewards" else None
    for _ in range(config.retries):
        try:
            if await _right(config, dialogue, judgement):
                break
            dialogue.tell(_on_own_lines(config.retry, dialogue))
            reply = await dialogue.ask()
        except ContextLengthError:
            break
        taken += 1
        judgement = await judge(reply) if config.critic == "rewards" else None
    judgement = judgement or await judge(reply)
    if config.discount == 1 or judgement.reward is None:
        return judgement
    return judgement, {RETRIES_METRIC: judgement.reward * (config.discount**taken - 1)}


async def _right(config: ReflectionWorkflow, dialogue: PolicyConversation, judgement: RewardResult | None) -> bool:
    if judgement is not None:
        return judgement.reward is not None and judgement.reward >= config.threshold
    dialogue.tell(_on_own_lines(config.check, dialogue))
    verdict = await dialogue.ask()
    return verdict.completion.answer.strip().lower().startswith("yes")


def _on_own_lines(text: str, dialogue: PolicyConversation) -> str:
    """Put a text on lines of its own in plain text."""
    return f"\n{text}\n" if dialogue.plain else text
