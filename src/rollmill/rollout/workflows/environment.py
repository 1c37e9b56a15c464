"""Workflow `environment`: turns with an environment until it is done."""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from rollmill.config.workflows import CompactionConfig, WorkflowSection
from rollmill.errors import ContextLengthError
from rollmill.types import Task

if TYPE_CHECKING:
    from rollmill.config.run import StageConfig
    from rollmill.rollout.environments.base import Observation
    from rollmill.rollout.environments.pool import RunningEnvironment
    from rollmill.rollout.policy import Policy, PolicyConversation, Reply


class EnvironmentWorkflow(WorkflowSection):
    """Interacts with the section `environment` until the episode ends; the reward is the sum of its rewards."""

    uses_rewards: ClassVar[bool] = False
    uses_environment: ClassVar[bool] = True
    multi_step: ClassVar[bool] = True

    name: Literal["environment"] = "environment"
    turns: int = Field(16, ge=1)
    """Maximum turns of the policy."""
    system: str | None = None
    """System message, or text in front of a plain prompt."""
    history: Literal["full"] | Annotated[int, Field(ge=1)] = "full"
    """Context of the policy: the whole episode, or the task and the last N observations with the actions between them.
    With a number each turn is a separate step, as `gigpo` and `stepwise_grpo` need it."""
    steps: bool = False
    """Make each turn a separate step with its own reward, with `history: full`, too."""
    compaction: CompactionConfig | None = None
    """Summaries in place of an episode that has become long; null: it ends when the context is full."""

    def unused_keys(self) -> dict[str, str]:
        if self.history == "full":
            return {}
        return {
            "steps": "not honoured with history as a number, where each turn is a step; remove it",
            "compaction": "not honoured with history as a number, which bounds what the policy sees; remove it",
        }

    def stage_conflicts(self, stage: StageConfig) -> Iterator[tuple[str, str]]:
        advantage = getattr(stage.algorithm, "advantage", None)
        if self.history == "full" and not self.steps and advantage is not None and advantage.uses_episodes:
            text = f"advantage `{advantage.name}` compares steps, and this makes a whole episode one; set steps: true"
            yield "steps", f"{text}, or give history as a number"

    async def solve(self, task: Task, policy: Policy, environment: RunningEnvironment) -> float:
        """Return the sum of the environment's rewards. A conversation longer than the model's context ends the
        episode."""
        from rollmill.rollout.policy import PolicyConversation

        talk = self.conversation(task, policy) if self.history == "full" else _SlidingWindow(self, task, policy)
        by_step = self.steps or self.history != "full"
        total, turns, numbers = 0.0, 0, dict[str, float]()
        reply: Reply | None = None
        observation = await environment.reset()
        while turns < self.turns:
            try:
                if reply is not None and isinstance(talk, PolicyConversation):
                    await talk.compact(reply)
                talk.tell(observation)
                reply = await talk.ask()
            except ContextLengthError:
                if turns == 0:
                    raise
                numbers["overflows"] = 1.0
                break
            turns += 1
            result = await environment.step(reply.completion.answer)
            total += result.reward
            numbers |= result.info
            if by_step:
                policy.step(result.reward, anchor=_anchor_state(observation))
            if result.done:
                break
            observation = result.observation
        policy.log(**{"overflows": 0.0} | numbers | {"turns": float(turns)})
        return 0.0 if by_step else total

    def conversation(self, task: Task, policy: Policy) -> PolicyConversation:
        """Start a conversation with the system text and the task's prompt."""
        from rollmill.rollout.policy import PolicyConversation

        if isinstance(task.prompt, str):
            text = f"{self.system}\n\n{task.prompt}" if self.system else task.prompt
            return PolicyConversation(policy, text, self.compaction)
        system: Sequence[dict[str, str]] = [{"role": "system", "content": self.system}] if self.system else []
        return PolicyConversation(policy, [*system, *task.prompt], self.compaction)


def _anchor_state(observation: Observation) -> str:
    """Text that is equal for equal observations; a hash of those with pictures, which are long."""
    from rollmill.rollout.environments.base import has_pictures

    if isinstance(observation, str):
        return observation
    text = json.dumps(observation, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest() if has_pictures(observation) else text


@dataclass(slots=True)
class _Turn:
    observation: Observation
    replies: list[Reply] = field(default_factory=list)  #: the policy's reply, once it exists


class _SlidingWindow:
    """Shows the task and the last observations, with the actions between them: a new conversation at each turn."""

    def __init__(self, workflow: EnvironmentWorkflow, task: Task, policy: Policy) -> None:
        self._workflow, self._task, self._policy = workflow, task, policy
        self._turns: deque[_Turn] = deque(maxlen=workflow.history if isinstance(workflow.history, int) else None)

    def tell(self, observation: Observation) -> None:
        self._turns.append(_Turn(observation))

    async def ask(self) -> Reply:
        dialogue = self._workflow.conversation(self._task, self._policy)
        for turn in self._turns:
            dialogue.tell(turn.observation)
            for reply in turn.replies:
                dialogue.said(reply)
        reply = await dialogue.ask()
        self._turns[-1].replies.append(reply)
        return reply
