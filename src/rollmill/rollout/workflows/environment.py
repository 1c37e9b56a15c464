"""Workflow `environment`: turns with an environment until it is done."""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rollmill.config.workflows import EnvironmentWorkflow
from rollmill.errors import ContextLengthError
from rollmill.rollout.environments.base import Observation, has_pictures
from rollmill.rollout.environments.pool import RunningEnvironment
from rollmill.rollout.policy import Policy, PolicyConversation, Reply
from rollmill.types import Task


async def environment_turns(
    config: EnvironmentWorkflow, task: Task, policy: Policy, environment: RunningEnvironment
) -> float:
    """Return the sum of the environment's rewards. A conversation longer than the model's context ends the episode."""
    talk: _HistoryPolicy = (
        _FullHistory(config, task, policy) if config.history == "full" else _SlidingWindow(config, task, policy)
    )
    by_step = config.steps or config.history != "full"
    total, turns, numbers = 0.0, 0, dict[str, float]()
    observation = await environment.reset()
    while turns < config.turns:
        talk.see(observation)
        try:
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


def _anchor_state(observation: Observation) -> str:
    """Text that is equal for equal observations; a hash of those with pictures, which are long."""
    if isinstance(observation, str):
        return observation
    text = json.dumps(observation, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest() if has_pictures(observation) else text


class _HistoryPolicy(Protocol):
    """Chooses the part of the history that the policy sees."""

    def see(self, observation: Observation) -> None: ...

    async def ask(self) -> Reply: ...


class _FullHistory:
    """Shows the whole history."""

    def __init__(self, config: EnvironmentWorkflow, task: Task, policy: Policy) -> None:
        self._dialogue = _start_conversation(config, task, policy)

    def see(self, observation: Observation) -> None:
        self._dialogue.tell(observation)

    async def ask(self) -> Reply:
        return await self._dialogue.ask()


@dataclass(slots=True)
class _Turn:
    observation: Observation
    replies: list[Reply] = field(default_factory=list)  #: the policy's reply, once it exists


class _SlidingWindow:
    """Shows the task and the last observations, with the actions between them: a new conversation at each turn."""

    def __init__(self, config: EnvironmentWorkflow, task: Task, policy: Policy) -> None:
        self._config, self._task, self._policy = config, task, policy
        self._turns: deque[_Turn] = deque(maxlen=config.history if isinstance(config.history, int) else None)

    def see(self, observation: Observation) -> None:
        self._turns.append(_Turn(observation))

    async def ask(self) -> Reply:
        dialogue = _start_conversation(self._config, self._task, self._policy)
        for turn in self._turns:
            dialogue.tell(turn.observation)
            for reply in turn.replies:
                dialogue.said(reply)
        reply = await dialogue.ask()
        self._turns[-1].replies.append(reply)
        return reply


def _start_conversation(config: EnvironmentWorkflow, task: Task, policy: Policy) -> PolicyConversation:
    """Start a conversation with the system text and the task's prompt."""
    if isinstance(task.prompt, str):
        return PolicyConversation(policy, f"{config.system}\n\n{task.prompt}" if config.system else task.prompt)
    system: Sequence[dict[str, str]] = [{"role": "system", "content": config.system}] if config.system else []
    return PolicyConversation(policy, [*system, *task.prompt])
