"""What rolls out groups, wherever it does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from rollmill.config.rollout import SamplingConfig
from rollmill.types import Experience, Task

OnGenerated = Callable[[list[Experience]], None]
"""Is handed a group when its tokens are there; its rewards may come later, into the same objects."""


class RolloutGenerator(Protocol):
    """All that an evaluation needs of an explorer."""

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
        """The judged experiences of n rollouts of one task."""
        ...


class ExplorerProtocol(RolloutGenerator, Protocol):
    """An explorer, in this process or in another one."""

    elsewhere: bool
    """It has weights of its own and goes on while the trainer trains."""

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
        """See RolloutGenerator. With `with_greedy` each experience's info has the reward of a greedy rollout."""
        ...

    def take_counts(self) -> dict[str, float]:
        """What has become of rollouts since the last call."""
        ...
