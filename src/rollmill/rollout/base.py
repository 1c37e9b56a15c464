"""Protocols of explorers, local and remote."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rollmill.config.rollout import SamplingConfig
from rollmill.types import Completion, Experience, Task

OnGenerated = Callable[[list[Experience]], None]
"""Called with a group once its tokens are generated; its rewards may be set later, in the same objects."""


@dataclass(slots=True)
class PartialRollout:
    """Experiences of a group, finished or interrupted, and their completions in the same order.

    Where another process has rolled out, there are no completions, and finished groups have their rewards already.
    """

    experiences: list[Experience]
    completions: list[Completion] = field(default_factory=list)


class RolloutGenerator(Protocol):
    """The part of an explorer that an evaluation needs."""

    async def rollout(
        self,
        task: Task,
        sampling: SamplingConfig,
        *,
        n: int,
        seed: int,
        group: str,
        generated: OnGenerated | None = None,
    ) -> list[Experience]:
        """Return the experiences of n rollouts of one task, with rewards."""
        ...


class ExplorerProtocol(RolloutGenerator, Protocol):
    """An explorer, in this process or in another one."""

    is_remote: bool
    """Whether it runs in another process: it has its own weights and continues while the trainer trains."""

    async def rollout(
        self,
        task: Task,
        sampling: SamplingConfig,
        *,
        n: int,
        seed: int,
        group: str,
        generated: OnGenerated | None = None,
        with_greedy: bool = False,
    ) -> list[Experience]:
        """With `with_greedy` each experience has the reward of a greedy rollout."""
        ...

    async def part(
        self,
        task: Task,
        sampling: SamplingConfig,
        *,
        n: int,
        seed: int,
        group: str,
        begun: Sequence[Experience] = (),
    ) -> PartialRollout:
        """Generate n completions of a task until they end, or the engine is interrupted.

        Args:
            begun: experiences of an earlier part of the same group.
        """
        ...

    async def score_part(self, task: Task, sampling: SamplingConfig, part: PartialRollout) -> None:
        """Set the rewards of a part whose completions have all ended, where they are missing."""

    def take_counts(self) -> dict[str, float]:
        """Counts of rollouts since the last call."""
        ...
