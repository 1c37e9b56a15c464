"""Rewards score completions. `build_reward_manager(config.rewards)` builds the RewardManager of a run."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollmill.config.rewards import Reward as Reward
    from rollmill.rewards.base import RewardResult as RewardResult
    from rollmill.rewards.base import Score as Score
    from rollmill.rewards.manager import RewardManager as RewardManager
    from rollmill.rewards.manager import build_reward_manager as build_reward_manager
    from rollmill.rewards.values import RewardValue as RewardValue

_HOMES = {
    "Reward": "rollmill.config.rewards",
    "RewardManager": "rollmill.rewards.manager",
    "RewardResult": "rollmill.rewards.base",
    "RewardValue": "rollmill.rewards.values",
    "Score": "rollmill.rewards.base",
    "build_reward_manager": "rollmill.rewards.manager",
}


def __getattr__(name: str) -> Any:
    """Import the names on first use: a grader process uses none of them, and starts in a fifth of the time."""
    if name not in _HOMES:
        raise AttributeError(f"module 'rollmill.rewards' has no attribute '{name}'")
    return getattr(import_module(_HOMES[name]), name)
