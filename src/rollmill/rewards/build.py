"""From a run file's `rewards` to a judge."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollmill.config.judging import RewardManagerConfig
from rollmill.config.rewards import (
    CitationReward,
    CodeReward,
    ExactReward,
    FormatReward,
    JudgeReward,
    K12Reward,
    LanguageReward,
    LengthReward,
    MathReward,
    ModelReward,
    PairwiseReward,
    PythonReward,
    RankingReward,
    ReasoningGymReward,
    RepetitionReward,
    RewardConfig,
    ToolCallReward,
    VisionReward,
)
from rollmill.config.rewards.names import reward_part_names
from rollmill.errors import ConfigError
from rollmill.rewards.base import GroupReward, Reward
from rollmill.rewards.manager import RewardManager, WeightedReward
from rollmill.rewards.resources import RewardResources


def build_reward_manager(
    configs: Sequence[RewardConfig],
    judging: RewardManagerConfig | None = None,
    *,
    tokenizer: Any = None,
    device: str | None = None,
) -> RewardManager:
    """The judge of a run file's `rewards` and `judging`.

    Rewards of one name are told apart as name, name#2, ...; a Python function goes by its own name. Processes start
    when the first completion needs one.

    Args:
        tokenizer: what the completions' tokens are of; None where they are text.
        device: where reward models go; None: a GPU where torch finds one.

    Raises:
        ConfigError: a Python function cannot be loaded, a judge's endpoint lacks its key, or a reward that compares
            completions is a gate.
        ModelError: a reward model or a judge cannot be loaded.
        SandboxError: a package that code may use is not installed.
    """
    judging = judging or RewardManagerConfig()
    resources = RewardResources(judging.workers, tokenizer, device)
    parts = []
    try:
        for name, config in zip(reward_part_names(configs), configs, strict=True):
            part = WeightedReward(name, config, build_reward(config, resources))
            if part.groupwise and config.gate is not None:
                raise ConfigError(f"reward `{name}` compares completions, so it cannot be a gate; remove its `gate`")
            parts.append(part)
    except BaseException:
        resources.close()
        raise
    return RewardManager(parts, judging, resources)


def build_reward(config: RewardConfig, resources: RewardResources) -> Reward | GroupReward:
    """One reward. Libraries are imported here, so that a run pays for those it uses only."""
    match config:
        case MathReward():
            from rollmill.rewards.math import MathScorer

            return MathScorer(config, resources.graders)
        case ReasoningGymReward():
            from rollmill.rewards.reasoning_gym import ReasoningGymScorer

            return ReasoningGymScorer(config, resources.graders)
        case PythonReward():
            from rollmill.rewards.python import build_python_reward

            return build_python_reward(config, resources)
        case ModelReward():
            from rollmill.rewards.reward_model import RewardModelScorer

            return RewardModelScorer(config, resources.tokenizer, resources.device)
        case CodeReward():
            from rollmill.rewards.code.reward import CodeScorer

            return CodeScorer(config, resources)
        case K12Reward():
            from rollmill.rewards.k12 import K12Scorer

            return K12Scorer(config, resources)
        case JudgeReward():
            from rollmill.rewards.judges.generative import GenerativeJudge

            return GenerativeJudge(config, resources)
        case PairwiseReward():
            from rollmill.rewards.judges.pairwise import build_pairwise_judge

            return build_pairwise_judge(config, resources)
        case RankingReward():
            from rollmill.rewards.judges.ranking import RankingJudge

            return RankingJudge(config, resources)
        case VisionReward():
            from rollmill.rewards.vision.build import build_vision_reward

            return build_vision_reward(config)
        case (
            ExactReward()
            | FormatReward()
            | LanguageReward()
            | LengthReward()
            | RepetitionReward()
            | CitationReward()
            | ToolCallReward()
        ):
            from rollmill.rewards.text.build import build_text_reward

            return build_text_reward(config, resources)
