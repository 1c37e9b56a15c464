"""Builds the rewards for vision-language models."""

from __future__ import annotations

from rollmill.config.rewards import (
    BoxesReward,
    ChartReward,
    CountReward,
    GroundingReward,
    OCRReward,
    PointsReward,
    TableReward,
    VQAReward,
)
from rollmill.rewards.base import Reward
from rollmill.rewards.vision.boxes import BoxesScorer, GroundingScorer
from rollmill.rewards.vision.chart import ChartScorer
from rollmill.rewards.vision.count import CountScorer
from rollmill.rewards.vision.ocr import OCRScorer
from rollmill.rewards.vision.points import PointsScorer
from rollmill.rewards.vision.table import TableScorer
from rollmill.rewards.vision.vqa import VQAScorer

VisionRewardConfig = (
    BoxesReward | PointsReward | GroundingReward | CountReward | OCRReward | ChartReward | TableReward | VQAReward
)


def build_vision_reward(config: VisionRewardConfig) -> Reward:
    """Build one vision reward. Raises ConfigError if a library is missing."""
    match config:
        case BoxesReward():
            return BoxesScorer(config)
        case PointsReward():
            return PointsScorer(config)
        case GroundingReward():
            return GroundingScorer(config)
        case CountReward():
            return CountScorer(config)
        case OCRReward():
            return OCRScorer(config)
        case ChartReward():
            return ChartScorer(config)
        case TableReward():
            return TableScorer(config)
        case VQAReward():
            return VQAScorer(config)
