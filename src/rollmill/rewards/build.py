"""From a run file's `rewards` to a judge."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

from rollmill.config.judging import JudgingConfig
from rollmill.config.rewards import (
    CodeReward,
    ExactReward,
    FormatReward,
    MathReward,
    ModelReward,
    PythonReward,
    ReasoningGymReward,
    RewardConfig,
)
from rollmill.rewards.base import GroupReward, Reward
from rollmill.rewards.judge import Judge, Part
from rollmill.rewards.resources import Resources


def build_judge(
    configs: Sequence[RewardConfig],
    judging: JudgingConfig | None = None,
    *,
    tokenizer: Any = None,
    device: str | None = None,
) -> Judge:
    """The judge of a run file's `rewards` and `judging`.

    Rewards of one name are told apart as name, name#2, ...; a Python function goes by its own name. Processes start
    when the first completion needs one.

    Args:
        tokenizer: what the completions' tokens are of; None where they are text.
        device: where reward models go; None: a GPU where torch finds one.

    Raises:
        ConfigError: a Python function cannot be loaded.
        ModelError: a reward model cannot.
        SandboxError: a package that code may use is not installed.
    """
    judging = judging or JudgingConfig()
    resources = Resources(judging.workers, tokenizer, device)
    seen: dict[str, int] = {}
    parts = []
    for config in configs:
        name = _name(config)
        seen[name] = count = seen.get(name, 0) + 1
        parts.append(Part(name if count == 1 else f"{name}#{count}", config, build_reward(config, resources)))
    return Judge(parts, judging, resources)


def build_reward(config: RewardConfig, resources: Resources) -> Reward | GroupReward:
    """One reward. Libraries are imported here, so that a run pays for those it uses only."""
    match config:
        case MathReward():
            from rollmill.rewards.math import Math

            return Math(config, resources.graders)
        case ExactReward():
            from rollmill.rewards.exact import Exact

            return Exact(config)
        case FormatReward():
            from rollmill.rewards.format import Format

            return Format(config)
        case ReasoningGymReward():
            from rollmill.rewards.reasoning_gym import ReasoningGym

            return ReasoningGym(config, resources.graders)
        case PythonReward():
            from rollmill.rewards.python import python_reward

            return python_reward(config, resources)
        case ModelReward():
            from rollmill.rewards.model import Model

            return Model(config, resources.tokenizer, resources.device)
        case CodeReward():
            from rollmill.rewards.code.reward import Code

            return Code(config, resources)


def _name(config: RewardConfig) -> str:
    return PurePath(config.function).name.rpartition(":")[2] if isinstance(config, PythonReward) else config.name
