"""`rewards`: scoring of completions. Each entry is one part; the reward is the weighted sum of the parts."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rollmill.config.rewards.base import GateConfig, PythonReward, RewardSection
from rollmill.config.rewards.code import CodeReward
from rollmill.config.rewards.judges import JudgeReward, JudgeSection, ModelReward, PairwiseReward, RankingReward
from rollmill.config.rewards.k12 import K12Reward
from rollmill.config.rewards.math import AnswerExtraction, MathReward, ReasoningGymReward
from rollmill.config.rewards.text import (
    CitationReward,
    ExactReward,
    FormatReward,
    LanguageReward,
    LengthReward,
    RepetitionReward,
    TextReward,
    ToolCallReward,
)
from rollmill.config.rewards.vision import (
    BoxesReward,
    ChartReward,
    CountReward,
    GroundingReward,
    OCRReward,
    PointsReward,
    TableReward,
    VisionReward,
    VQAReward,
)

RewardConfig = Annotated[
    MathReward
    | ExactReward
    | FormatReward
    | ReasoningGymReward
    | PythonReward
    | ModelReward
    | CodeReward
    | LanguageReward
    | LengthReward
    | RepetitionReward
    | CitationReward
    | ToolCallReward
    | BoxesReward
    | PointsReward
    | GroundingReward
    | CountReward
    | OCRReward
    | ChartReward
    | TableReward
    | VQAReward
    | JudgeReward
    | PairwiseReward
    | RankingReward
    | K12Reward,
    Field(discriminator="name"),
]

__all__ = [
    "AnswerExtraction",
    "BoxesReward",
    "ChartReward",
    "CitationReward",
    "CodeReward",
    "CountReward",
    "ExactReward",
    "FormatReward",
    "GateConfig",
    "GroundingReward",
    "JudgeReward",
    "JudgeSection",
    "K12Reward",
    "LanguageReward",
    "LengthReward",
    "MathReward",
    "ModelReward",
    "OCRReward",
    "PairwiseReward",
    "PointsReward",
    "PythonReward",
    "RankingReward",
    "ReasoningGymReward",
    "RepetitionReward",
    "RewardConfig",
    "RewardSection",
    "TableReward",
    "TextReward",
    "ToolCallReward",
    "VQAReward",
    "VisionReward",
]
