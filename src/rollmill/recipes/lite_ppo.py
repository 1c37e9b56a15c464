"""Lite PPO: the group's mean and the batch's standard deviation, token mean, no critic.

A_i = (r_i - mean within the group) / (std of all rewards of the batch + eps)
L = 1/sum_i T_i sum_i sum_t -min(rho A_i, clip(rho) A_i)
"""

from __future__ import annotations

from typing import ClassVar, Literal

from rollmill.config.advantage import AdvantageConfig, GroupNormalised
from rollmill.config.algorithm import PolicyGradientOptions


class LitePPO(PolicyGradientOptions):
    """Lite PPO: mean of the group, standard deviation of the batch, token mean."""

    source: ClassVar[str] = "arXiv:2508.08221"

    name: Literal["lite_ppo"] = "lite_ppo"
    advantage: AdvantageConfig = GroupNormalised(scale="batch")
