"""Rewards: what judges a completion. `build_judge(config.rewards)` makes the judge of a run."""

from rollmill.rewards.base import GroupReward, Judgement, Reward, Value, Verdict
from rollmill.rewards.build import build_judge
from rollmill.rewards.judge import Judge, Part

__all__ = ["GroupReward", "Judge", "Judgement", "Part", "Reward", "Value", "Verdict", "build_judge"]
