"""How operators change a reward: what they add is a part of its own, and the first reward is kept in `info`."""

from __future__ import annotations

import math

from rollmill.pipelines.batch import Batch, reward_value, rollouts_of
from rollmill.types import Experience

RAW_REWARD = "raw_reward"
"""Key of `info`: the reward before the first operator changed it."""


def init_reward_part(batch: Batch) -> None:
    """Give every judged rollout the part pipeline/OPERATOR, 0 so far: advantages that see parts compare it."""
    for experience in rollouts_of(batch):
        if reward_value(experience, None) is not None:
            experience.reward_parts.setdefault(_part(batch), 0.0)


def add_reward(batch: Batch, experience: Experience, value: float, why: str) -> None:
    """Add `value` to a reward and to its part pipeline/OPERATOR, so that the parts still make up the sum.

    An experience without a reward stays without.
    """
    if value and experience.reward is not None:
        set_reward(batch, experience, experience.reward + value, why)


def set_reward(batch: Batch, experience: Experience, reward: float, why: str) -> None:
    """Set a reward; the difference is the part pipeline/OPERATOR. One that was missing or not finite counts as 0."""
    before = experience.reward
    if before == reward:
        return
    experience.info.setdefault(RAW_REWARD, before)
    known = before if before is not None and math.isfinite(before) else 0.0
    own = experience.reward_parts.get(_part(batch)) or 0.0
    experience.reward_parts[_part(batch)] = own + reward - known
    experience.reward = reward
    batch.change(experience, why)


def log_reward_detail(experience: Experience, key: str, value: float | None) -> None:
    """Note a number that is logged as reward/KEY and not counted."""
    if value is not None:
        experience.info.setdefault("details", {})[key] = value


def _part(batch: Batch) -> str:
    return f"pipeline/{batch.operator}"
