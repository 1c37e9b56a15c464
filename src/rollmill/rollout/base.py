"""What rolls out groups, wherever it does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from rollmill.config.rollout import SamplingConfig
from rollmill.config.run import StageConfig
from rollmill.rewards import RewardManager
from rollmill.rollout.draft_cache import DraftCache
from rollmill.trackers.trace import Trace
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


class ExplorerSource(Protocol):
    """Makes explorers that share an engine, rewards and what workflows need."""

    def explorer(self, trace: Trace | None = None, drafts: DraftCache | None = None) -> RolloutGenerator:
        """One that rolls out as the section `workflow` says."""
        ...

    def variant(self, config: StageConfig, rewards: RewardManager, /) -> ExplorerSource:
        """Another source for the same policy, whose tasks are rolled out or judged as `config` says."""
        ...

    def metrics(self) -> dict[str, float]:
        """What has happened in environments and tools since the last call."""
        ...

    async def close(self) -> None:
        """End what the explorers have opened."""


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
