"""Rewards score completions. `build_reward_manager(config.rewards)` builds the RewardManager of a run."""

from rollmill.rewards.base import GroupReward, Reward, RewardResult, RewardValue, Score
from rollmill.rewards.manager import RewardManager, WeightedReward, build_reward_manager

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
