"""Builds the rewards for text."""

from __future__ import annotations

from rollmill.config.rewards import (
    CitationReward,
    ExactReward,
    FormatReward,
    LanguageReward,
    LengthReward,
    RepetitionReward,
    ToolCallReward,
)
from rollmill.rewards.base import GroupReward, Reward
from rollmill.rewards.resources import RewardResources
from rollmill.rewards.text.citation import CitationScorer
from rollmill.rewards.text.format import ExactScorer, build_format_scorer
from rollmill.rewards.text.language import LanguageScorer
from rollmill.rewards.text.length import build_length_scorer
from rollmill.rewards.text.repetition import RepetitionScorer
from rollmill.rewards.text.tool_call import ToolCallScorer

TextRule = (
    ExactReward | FormatReward | LanguageReward | LengthReward | RepetitionReward | CitationReward | ToolCallReward
)


def build_text_reward(config: TextRule, resources: RewardResources) -> Reward | GroupReward:
    """Build one text reward. Raises ConfigError if a library is missing, or a schema or language is invalid."""
    match config:
        case ExactReward():
            return ExactScorer(config)
        case FormatReward():
            return build_format_scorer(config, resources)
        case LanguageReward():
            return LanguageScorer(config)
        case LengthReward():
            return build_length_scorer(config)
        case RepetitionReward():
            return RepetitionScorer(config)
        case CitationReward():
            return CitationScorer(config)
        case ToolCallReward():
            return ToolCallScorer(config, resources.graders)
