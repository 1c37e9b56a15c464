"""Environments for audits: a right one, and ones that are broken in one way each."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import rollmill
from rollmill.rollout.environments.base import StepResult


class Guess:
    """Say the number of the task. Every wrong guess is told which way to go."""

    def reset(self, task: Any, seed: int) -> str:
        self.number, self.turn = int(task.answer), 0
        return f"Guess a number from 0 to 100 (game {seed})"

    def step(self, action: str) -> StepResult:
        self.turn += 1
        try:
            guess = int(action[:9])
        except ValueError:
            return StepResult("say a number", 0.0, self.turn >= 12)
        if guess == self.number:
            return StepResult("right", 1.0, True)
        return StepResult("higher" if guess < self.number else "lower", 0.0, self.turn >= 12)


@rollmill.environment
class right(Guess):  # noqa: N801
    def reset(self, task: Any, seed: int) -> str:
        return super().reset(task, seed)

    def step(self, action: str) -> StepResult:
        return super().step(action)


@rollmill.environment
class begins_anyhow(Guess):  # noqa: N801
    def reset(self, task: Any, seed: int) -> str:
        return super().reset(task, seed) + f" {random.random()}"

    def step(self, action: str) -> StepResult:
        return super().step(action)


@rollmill.environment
class rewards_silence(Guess):  # noqa: N801
    def reset(self, task: Any, seed: int) -> str:
        return super().reset(task, seed)

    def step(self, action: str) -> StepResult:
        return super().step(action) if action else StepResult("fine", 1.0, True)


@rollmill.environment
class crashes(Guess):  # noqa: N801
    def reset(self, task: Any, seed: int) -> str:
        return super().reset(task, seed)

    def step(self, action: str) -> StepResult:
        return super().step(action if action[0] != "x" else "0")


@rollmill.environment
class hangs(Guess):  # noqa: N801
    def reset(self, task: Any, seed: int) -> str:
        return super().reset(task, seed)

    async def step(self, action: str) -> StepResult:
        if action == "null":
            await asyncio.sleep(60)
        return super().step(action)


@rollmill.environment
class never_right(Guess):  # noqa: N801
    def reset(self, task: Any, seed: int) -> str:
        return super().reset(task, seed)

    def step(self, action: str) -> StepResult:
        found = super().step(action)
        return StepResult(found.observation, 0.5 * found.reward, found.done)


def binary_search(task: Any, seen: Any, turn: int) -> str:
    """Knows the number, and says it in the third turn."""
    return task.answer if turn == 2 else str(50 + turn if task.answer != str(50 + turn) else 0)
