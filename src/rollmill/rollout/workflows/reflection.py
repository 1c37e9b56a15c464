"""Workflow `reflection`: answer, be told of errors, think, answer again (after Reflexion, arXiv:2303.11366)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from rollmill.config.workflows import WorkflowSection
from rollmill.errors import ContextLengthError
from rollmill.types import Task

if TYPE_CHECKING:
    from rollmill.rewards import RewardResult
    from rollmill.rollout.policy import Policy, PolicyConversation
    from rollmill.rollout.workflow import RolloutScorer, WorkflowResult

RETRIES_METRIC = "retries"
"""The reward part with the cost of retries."""


class ReflectionWorkflow(WorkflowSection):
    """The policy answers; after a wrong answer it is asked to reflect and to answer again."""

    multi_step: ClassVar[bool] = True

    name: Literal["reflection"] = "reflection"
    retries: int = Field(1, ge=1)
    """Maximum number of further answers."""
    critic: Literal["rewards", "self"] = "rewards"
    """Judge of answers: `rewards` (wrong below `threshold`), or the policy itself in a separate turn."""
    threshold: float = 1.0
    """Minimum reward of a right answer. Only with `critic: rewards`."""
    check: str = "Is this answer right? Begin with yes or no, then say why."
    """Question to the policy about its own answer. Only with `critic: self`."""
    retry: str = "That is not right. Think about what went wrong, then give a better answer."
    """Message to the policy before it answers again."""
    discount: float = Field(1.0, gt=0, le=1)
    """Factor of the last answer's reward per retry used; the part `retries` logs the amount it subtracts."""

    @property
    def needs_rewards(self) -> bool:
        return self.critic == "rewards"

    @property
    def early_rewards(self) -> str | None:
        return "critic: rewards" if self.critic == "rewards" else "discount" if self.discount < 1 else None

    def unused_keys(self) -> dict[str, str]:
        unused, other = ("check", "self") if self.critic == "rewards" else ("threshold", "rewards")
        return {unused: f"not honoured with critic `{self.critic}`; it is with `{other}`"}

    async def solve(self, task: Task, policy: Policy, judge: RolloutScorer) -> WorkflowResult:
        """Return the rewards of the last answer, discounted for each retry."""
        from rollmill.rollout.policy import PolicyConversation

        dialogue = PolicyConversation.of_task(policy, task)
        reply, taken = await dialogue.ask(), 0
        judgement = await judge(reply) if self.critic == "rewards" else None
        for _ in range(self.retries):
            try:
                if await self._right(dialogue, judgement):
                    break
                dialogue.tell(_on_own_lines(self.retry, dialogue))
                reply = await dialogue.ask()
            except ContextLengthError:
                break
            taken += 1
            judgement = await judge(reply) if self.critic == "rewards" else None
        judgement = judgement or await judge(reply)
        if self.discount == 1 or judgement.reward is None:
            return judgement
        return judgement, {RETRIES_METRIC: judgement.reward * (self.discount**taken - 1)}

    async def _right(self, dialogue: PolicyConversation, judgement: RewardResult | None) -> bool:
        if judgement is not None:
            return judgement.reward is not None and judgement.reward >= self.threshold
        dialogue.tell(_on_own_lines(self.check, dialogue))
        verdict = await dialogue.ask()
        return verdict.completion.answer.strip().lower().startswith("yes")


def _on_own_lines(text: str, dialogue: PolicyConversation) -> str:
    """Put a text on lines of its own in plain text."""
    return f"\n{text}\n" if dialogue.plain else text
