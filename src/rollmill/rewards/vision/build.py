"""From the configuration of an answer about pictures to the reward."""

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
from rollmill.rewards.vision.boxes import Boxes
from rollmill.rewards.vision.chart import Chart
from rollmill.rewards.vision.count import Count
from rollmill.rewards.vision.grounding import Grounding
from rollmill.rewards.vision.ocr import OCR
from rollmill.rewards.vision.points import Points
from rollmill.rewards.vision.table import Table
from rollmill.rewards.vision.vqa import VQA

AboutPictures = (
    BoxesReward | PointsReward | GroundingReward | CountReward | OCRReward | ChartReward | TableReward | VQAReward
)


def vision_reward(config: AboutPictures) -> Reward:
    """One reward for answers about pictures. Raises ConfigError where a library is missing."""
    match config:
        case BoxesReward():
            return Boxes(config)
        case PointsReward():
            return Points(config)
        case GroundingReward():
            return Grounding(config)
        case CountReward():
            return Count(config)
        case OCRReward():
            return OCR(config)
        case ChartReward():
            return Chart(config)
        case TableReward():
            return Table(config)
        case VQAReward():
            return VQA(config)
