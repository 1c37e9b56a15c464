"""`rewards`: what judges a completion. Each entry is one part; the reward is the weighted sum of the parts."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rollmill.config.rewards.base import GateConfig, RewardSection
from rollmill.config.rewards.code import CodeReward
from rollmill.config.rewards.math import AnswerPlace, MathReward, ReasoningGymReward
from rollmill.config.rewards.model import ModelReward
from rollmill.config.rewards.python import PythonReward
from rollmill.config.rewards.text import ExactReward, FormatReward

RewardConfig = Annotated[
    MathReward | ExactReward | FormatReward | ReasoningGymReward | PythonReward | ModelReward | CodeReward,
    Field(discriminator="name"),
]

__all__ = [
    "AnswerPlace",
    "CodeReward",
    "ExactReward",
    "FormatReward",
    "GateConfig",
    "MathReward",
    "ModelReward",
    "PythonReward",
    "ReasoningGymReward",
    "RewardConfig",
    "RewardSection",
]
