"""Names of rewards in metrics and in references between rewards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import PurePath

from rollmill.config.rewards.base import PythonReward, RewardSection


def reward_part_names(rewards: Sequence[RewardSection]) -> list[str]:
    """Returns one name per reward: its own or its Python function's; a second one of the same name is name#2."""
    seen: Counter[str] = Counter()
    names = []
    for reward in rewards:
        python = isinstance(reward, PythonReward)
        name = PurePath(reward.function).name.rpartition(":")[2] if python else reward.name  # type: ignore[attr-defined]
        seen[name] += 1
        names.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return names
