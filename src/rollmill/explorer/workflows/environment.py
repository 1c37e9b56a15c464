"""Turns with an environment until it is done."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rollmill.config.workflows import EnvironmentTurns
from rollmill.core.errors import ContextError
from rollmill.core.types import Task
from rollmill.explorer.dialogue import Dialogue
from rollmill.explorer.environments.base import Observation
from rollmill.explorer.environments.pool import RunningEnvironment
from rollmill.explorer.policy import Policy, Reply


async def environment_turns(
    config: EnvironmentTurns, task: Task, policy: Policy, environment: RunningEnvironment
) -> float:
    """The sum of the environment's rewards. A conversation that no longer fits the model's context ends the episode."""
    talk: _Talk = _Whole(config, task, policy) if config.history == "full" else _Window(config, task, policy)
    by_step = config.steps or config.history != "full"
    total, turns, numbers = 0.0, 0, dict[str, float]()
    observation = await environment.reset()
    while turns < config.turns:
        talk.see(observation)
        try:
            reply = await talk.ask()
        except ContextError:
            if turns == 0:
                raise
            numbers["overflows"] = 1.0
            break
        turns += 1
        result = await environment.step(reply.text)
        total += result.reward
        numbers |= result.info
        if by_step:
            policy.step(result.reward, anchor=_state(observation))
        if result.done:
            break
        observation = result.observation
    policy.log(**{"overflows": 0.0} | numbers | {"turns": float(turns)})
    return 0.0 if by_step else total


def _state(observation: Observation) -> str:
    """What is equal where the policy has seen the same."""
    return observation if isinstance(observation, str) else json.dumps(observation, sort_keys=True, default=str)


class _Talk(Protocol):
    """What the policy is shown."""

    def see(self, observation: Observation) -> None: ...

    async def ask(self) -> Reply: ...


class _Whole:
    """Everything so far."""

    def __init__(self, config: EnvironmentTurns, task: Task, policy: Policy) -> None:
        self._dialogue = _begun(config, task, policy)

    def see(self, observation: Observation) -> None:
        self._dialogue.tell(observation)

    async def ask(self) -> Reply:
        return await self._dialogue.ask()


@dataclass(slots=True)
class _Turn:
    observation: Observation
    replies: list[Reply] = field(default_factory=list)  #: what the policy did, once it has


class _Window:
    """The task and the last observations, with the actions between them: a new conversation at each turn."""

    def __init__(self, config: EnvironmentTurns, task: Task, policy: Policy) -> None:
        self._config, self._task, self._policy = config, task, policy
        self._turns: deque[_Turn] = deque(maxlen=config.history if isinstance(config.history, int) else None)

    def see(self, observation: Observation) -> None:
        self._turns.append(_Turn(observation))

    async def ask(self) -> Reply:
        dialogue = _begun(self._config, self._task, self._policy)
        for turn in self._turns:
            dialogue.tell(turn.observation)
            for reply in turn.replies:
                dialogue.said(reply)
        reply = await dialogue.ask()
        self._turns[-1].replies.append(reply)
        return reply


def _begun(config: EnvironmentTurns, task: Task, policy: Policy) -> Dialogue:
    """A conversation that begins with the system's text and the task's prompt."""
    if isinstance(task.prompt, str):
        return Dialogue(policy, f"{config.system}\n\n{task.prompt}" if config.system else task.prompt)
    system: Sequence[dict[str, str]] = [{"role": "system", "content": config.system}] if config.system else []
    return Dialogue(policy, [*system, *task.prompt])
