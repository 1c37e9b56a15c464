"""Rewards of a stage with domains: each task is scored by the rewards of its domain."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from rollmill.config.run import StageConfig
from rollmill.errors import RewardError
from rollmill.rewards.base import RewardResult
from rollmill.rewards.manager import RewardManager
from rollmill.types import Completion, Task


class DomainRewards(RewardManager):
    """The reward managers of a stage's domains, with the interface of one; `task.taskset` is the domain of a task."""

    def __init__(self, managers: Mapping[str, RewardManager]) -> None:
        self.domains = managers

    @property
    def weights(self) -> dict[str, float]:
        """Empty: each domain has weights of its own, see `domains`."""
        return {}

    @property
    def roles(self) -> set[str]:
        return {role for each in self.domains.values() for role in each.roles}

    @property
    def groupwise(self) -> bool:
        return any(each.groupwise for each in self.domains.values())

    def counters(self) -> dict[str, float]:
        """Counts rewards of one name in several domains together."""
        total: Counter[str] = Counter()
        for manager in self.domains.values():
            total.update(manager.counters())
        return dict(total)

    def set_weight(self, name: str, weight: float, from_version: int) -> None:
        """Change the weight in every domain that has the reward. Raises ConfigError if none has it."""
        found = [manager for manager in self.domains.values() if name in manager.weights]
        for manager in found or self.domains.values():
            manager.set_weight(name, weight, from_version)

    async def score(
        self, task: Task, completion: Completion, *, group_follows: bool = False, role: str | None = None
    ) -> RewardResult:
        """Raises RewardError also if the task belongs to no domain."""
        return await self._of(task).score(task, completion, group_follows=group_follows, role=role)

    async def add_group_rewards(
        self, task: Task, completions: Sequence[Completion], results: Sequence[RewardResult]
    ) -> list[RewardResult]:
        return await self._of(task).add_group_rewards(task, completions, results)

    async def score_group(self, task: Task, completions: Sequence[Completion]) -> list[RewardResult]:
        return await self._of(task).score_group(task, completions)

    def close(self) -> None:
        for manager in self.domains.values():
            manager.close()

    def _of(self, task: Task) -> RewardManager:
        manager = self.domains.get(task.taskset)
        if manager is None:
            known = ", ".join(f"`{name}`" for name in self.domains)
            raise RewardError(f"task {task.id} is of `{task.taskset}`, which is none of the domains {known}")
        return manager


def build_domain_rewards(stage: StageConfig, build: Callable[[StageConfig], RewardManager]) -> RewardManager:
    """Build the rewards of a stage: `build` makes one manager, of a stage without domains.

    Raises like `build`; the managers made so far are closed.
    """
    if not stage.domains:
        return build(stage)
    managers: dict[str, RewardManager] = {}
    try:
        for name, view in stage.by_domain().items():
            managers[name] = build(view)
    except BaseException:
        for manager in managers.values():
            manager.close()
        raise
    return DomainRewards(managers)
