"""Answer, be told that it is wrong, think, answer again (after Reflexion, arXiv:2303.11366)."""

from __future__ import annotations

from rollmill.config.workflows import Reflection
from rollmill.core.errors import ContextError
from rollmill.core.types import Task
from rollmill.explorer.dialogue import Dialogue
from rollmill.explorer.policy import Policy
from rollmill.explorer.workflow import Answer, RolloutJudge
from rollmill.rewards import Judgement

RETRIES = "retries"
"""The part of a reward that retries cost."""


async def reflection(config: Reflection, task: Task, policy: Policy, judge: RolloutJudge) -> Answer:
    """What the rewards say of the last answer, discounted for each retry."""
    dialogue = Dialogue.of_task(policy, task)
    reply, taken = await dialogue.ask(), 0
    judgement = await judge(reply) if config.critic == "rewards" else None
    for _ in range(config.retries):
        try:
            if await _right(config, dialogue, judgement):
                break
            dialogue.tell(_said(config.retry, dialogue))
            reply = await dialogue.ask()
        except ContextError:
            break
        taken += 1
        judgement = await judge(reply) if config.critic == "rewards" else None
    judgement = judgement or await judge(reply)
    if config.discount == 1 or judgement.reward is None:
        return judgement
    return judgement, {RETRIES: judgement.reward * (config.discount**taken - 1)}


async def _right(config: Reflection, dialogue: Dialogue, judgement: Judgement | None) -> bool:
    if judgement is not None:
        return judgement.reward is not None and judgement.reward >= config.threshold
    dialogue.tell(_said(config.check, dialogue))
    verdict = await dialogue.ask()
    return verdict.text.strip().lower().startswith("yes")


def _said(text: str, dialogue: Dialogue) -> str:
    """In plain text what is said stands on lines of its own."""
    return f"\n{text}\n" if dialogue.plain else text
