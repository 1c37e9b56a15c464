"""From the configuration of a rule on text to the reward."""

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
from rollmill.rewards.resources import Resources
from rollmill.rewards.text.citation import Citation
from rollmill.rewards.text.exact import Exact
from rollmill.rewards.text.format import format_reward
from rollmill.rewards.text.language import Language
from rollmill.rewards.text.length import length_reward
from rollmill.rewards.text.repetition import Repetition
from rollmill.rewards.text.tool_call import ToolCall

TextRule = (
    ExactReward | FormatReward | LanguageReward | LengthReward | RepetitionReward | CitationReward | ToolCallReward
)


def text_reward(config: TextRule, resources: Resources) -> Reward | GroupReward:
    """One rule on text. Raises ConfigError where a library is missing, or a schema or language is none."""
    match config:
        case ExactReward():
            return Exact(config)
        case FormatReward():
            return format_reward(config, resources)
        case LanguageReward():
            return Language(config)
        case LengthReward():
            return length_reward(config)
        case RepetitionReward():
            return Repetition(config)
        case CitationReward():
            return Citation(config)
        case ToolCallReward():
            return ToolCall(config, resources.graders)
