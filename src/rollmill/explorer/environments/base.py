"""What an environment is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from rollmill.core.types import Task


@dataclass(frozen=True, slots=True)
class StepResult:
    """What an action led to. `observation` is what the policy sees next; `info` has numbers that are logged."""

    observation: str
    reward: float = 0.0
    done: bool = False
    info: dict[str, Any] = field(default_factory=dict)


class Environment(Protocol):
    """One episode at a time; used by one rollout."""

    async def reset(self, task: Task, seed: int) -> str:
        """Begin an episode of a task; what the policy sees first. The same task and seed begin alike."""
        ...

    async def step(self, action: str) -> StepResult:
        """Act as the policy says."""
        ...

    async def close(self) -> None:
        """Free what it holds; may be called at any time, more than once."""
        ...
