"""Turns with an environment until it is done."""

from __future__ import annotations

from rollmill.config.workflows import EnvironmentTurns
from rollmill.core.types import Task
from rollmill.explorer.dialogue import Dialogue
from rollmill.explorer.environments.base import Environment
from rollmill.explorer.policy import Policy


async def environment_turns(config: EnvironmentTurns, task: Task, policy: Policy, environment: Environment) -> float:
    """The sum of the environment's rewards."""
    dialogue, total = Dialogue.of_task(policy, task), 0.0
    dialogue.tell(await environment.reset(task, policy.seed))
    for _ in range(config.turns):
        reply = await dialogue.ask()
        result = await environment.step(reply.text)
        total += result.reward
        if result.done:
            break
        dialogue.tell(result.observation)
    return total
