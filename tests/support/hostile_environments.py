"""Environments that misbehave as their task says; read by tests, here and in worker processes."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import rollmill
from rollmill.rollout.environments import StepResult
from rollmill.types import Task


@rollmill.environment
class Hostile:
    """Counts its steps; the action says what it does."""

    def __init__(self, *, note: str = "") -> None:
        self.count, self.seed, self.note = 0, 0, note
        self.kept: list[bytearray] = []

    def reset(self, task: Task, seed: int) -> Any:
        """Begin as the task's prompt says."""
        self.count, self.seed = 0, seed
        if task.prompt == "number":
            return 7
        return f"{task.id} {seed} {os.getpid()}"

    def step(self, action: str) -> Any:
        """Do what the action says."""
        self.count += 1
        name, _, value = action.partition(" ")
        if name == "sleep":
            time.sleep(float(value))
        elif name == "raise":
            raise ValueError("of its own")
        elif name == "exit":
            sys.exit(3)
        elif name == "die":
            os._exit(3)
        elif name == "leak":
            self.kept.append(bytearray(int(value) << 20))
        elif name == "print":
            print("garbage" * 1000)
            os.write(1, b"\x00\x00\x00\x01x" * 1000)
            print(sys.stdin.read())
        elif name == "tuple":
            return ("text", 1.0)
        elif name == "nan":
            return StepResult("", float("nan"))
        elif name == "set":
            return StepResult([{"role": "user", "content": "what is no JSON", "more": {1, 2}}])
        elif name == "huge":
            return StepResult("x" * (17 << 20))
        elif name == "fork" and os.fork() == 0:
            time.sleep(30)
            os._exit(0)
        return StepResult(f"{name} {self.count}", float(self.count), info={"count": self.count, "word": "no number"})

    def close(self) -> None:
        """Leave a trace."""
        if self.note == "raise":
            raise ValueError("not closed")
        if self.note:
            with open(self.note, "a") as file:
                file.write(f"closed {self.count}\n")


@rollmill.environment
class Polite:
    """Async, with messages."""

    def __init__(self) -> None:
        self.said: list[str] = []

    async def reset(self, task: Task, seed: int) -> list[dict[str, str]]:
        """Two messages."""
        return [{"role": "user", "content": "What"}, {"role": "user", "content": "now?"}]

    async def step(self, action: str) -> StepResult:
        """Done at the second action."""
        self.said.append(action)
        return StepResult("more", 0.5, done=len(self.said) == 2)
