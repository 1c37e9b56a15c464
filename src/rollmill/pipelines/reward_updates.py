"""Functions with which operators change rewards: the change is a separate part, and `info` keeps the first reward."""

from __future__ import annotations

import math

from rollmill.pipelines.batch import Batch, reward_value, rollouts_of
from rollmill.types import Experience

RAW_REWARD = "raw_reward"
"""Key of `info`: the reward before the first operator changed it."""


def init_reward_part(batch: Batch) -> None:
    """Add the part pipeline/OPERATOR = 0 to every scored rollout, because some advantages compare parts."""
    for experience in rollouts_of(batch):
        if reward_value(experience, None) is not None:
            experience.reward_parts.setdefault(_part(batch), 0.0)


def add_reward(batch: Batch, experience: Experience, value: float, why: str) -> None:
    """Add `value` to a reward and to its part pipeline/OPERATOR, so that the parts still add up to the reward.

    Does nothing for an experience without a reward.
    """
    if value and experience.reward is not None:
        set_reward(batch, experience, experience.reward + value, why)


def set_reward(batch: Batch, experience: Experience, reward: float, why: str) -> None:
    """Set a reward; adds the difference to the part pipeline/OPERATOR. A missing or non-finite reward counts as 0."""
    before = experience.reward
    if before == reward:
        return
    experience.info.setdefault(RAW_REWARD, before)
    known = before if before is not None and math.isfinite(before) else 0.0
    part = experience.reward_parts.get(_part(batch)) or 0.0
    experience.reward_parts[_part(batch)] = part + reward - known
    experience.reward = reward
    batch.change(experience, why)


def log_reward_detail(experience: Experience, key: str, value: float | None) -> None:
    """Record a number that is logged as reward/KEY and does not count."""
    if value is not None:
        experience.info.setdefault("details", {})[key] = value


def _part(batch: Batch) -> str:
    return f"pipeline/{batch.operator}"
