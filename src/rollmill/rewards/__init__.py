"""Rewards: what judges a completion. `build_reward_manager(config.rewards)` makes the judge of a run."""

from rollmill.rewards.base import GroupReward, Reward, RewardResult, RewardValue, Score
from rollmill.rewards.build import build_reward_manager
from rollmill.rewards.manager import RewardManager, WeightedReward

__all__ = [
    "GroupReward",
    "Reward",
    "RewardManager",
    "RewardResult",
    "RewardValue",
    "Score",
    "WeightedReward",
    "build_reward_manager",
]
