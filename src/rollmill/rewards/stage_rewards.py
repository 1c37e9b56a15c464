"""The rewards of a stage: each task is scored by the rewards of its domain."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack

from rollmill.config.run import StageConfig
from rollmill.errors import RewardError
from rollmill.rewards.base import RewardResult
from rollmill.rewards.manager import RewardManager
from rollmill.types import Completion, Task


class StageRewards:
    """The reward managers of a stage by domain: `task.taskset` is the domain of a task, "" stands for all tasks.

    Its methods score tasks of any domain, and may be called like those of one manager.
    """

    def __init__(self, by_domain: Mapping[str, RewardManager]) -> None:
        self.by_domain = dict(by_domain)

    @classmethod
    def build(cls, stage: StageConfig, build: Callable[[StageConfig], RewardManager]) -> StageRewards:
        """Build the manager of each domain, or of a stage without domains.

        Raises like `build`; the managers made so far are closed.
        """
        managers: dict[str, RewardManager] = {}
        with ExitStack() as made_so_far:
            for name, view in stage.by_domain().items():
                managers[name] = build(view)
                made_so_far.callback(managers[name].close)
            made_so_far.pop_all()
        return cls(managers)

    @property
    def names(self) -> list[str]:
        """Names of all rewards."""
        return list(dict.fromkeys(name for manager in self.by_domain.values() for name in manager.weights))

    @property
    def groupwise(self) -> bool:
        """True if some reward needs all completions of a task together."""
        return any(each.groupwise for each in self.by_domain.values())

    def counters(self) -> dict[str, float]:
        """Sum the rewards' counters, of one name in several domains together."""
        total: Counter[str] = Counter()
        for manager in self.by_domain.values():
            total.update(manager.counters())
        return dict(total)

    def set_weight(self, name: str, weight: float, from_version: int) -> None:
        """Change the weight in every domain that has the reward. Raises ConfigError if none has it."""
        found = [manager for manager in self.by_domain.values() if name in manager.weights]
        for manager in found or self.by_domain.values():
            manager.set_weight(name, weight, from_version)

    def of(self, task: Task) -> RewardManager:
        """Return the manager that scores a task. Raises RewardError if the task belongs to no domain."""
        manager = self.by_domain.get("") or self.by_domain.get(task.taskset)
        if manager is None:
            known = ", ".join(f"`{name}`" for name in self.by_domain)
            raise RewardError(f"task {task.id} is of `{task.taskset}`, which is none of the domains {known}")
        return manager

    async def score(
        self, task: Task, completion: Completion, *, group_follows: bool = False, role: str | None = None
    ) -> RewardResult:
        """Score one completion; see `RewardManager.score`."""
        return await self.of(task).score(task, completion, group_follows=group_follows, role=role)

    async def add_group_rewards(
        self, task: Task, completions: Sequence[Completion], results: Sequence[RewardResult]
    ) -> list[RewardResult]:
        """Add the rewards that compare completions; see `RewardManager.add_group_rewards`."""
        return await self.of(task).add_group_rewards(task, completions, results)

    async def score_group(self, task: Task, completions: Sequence[Completion]) -> list[RewardResult]:
        """Score all completions of a task; see `RewardManager.score_group`."""
        return await self.of(task).score_group(task, completions)

    def close(self) -> None:
        """End the processes of all rewards."""
        for manager in self.by_domain.values():
            manager.close()
