"""DPPO with a trust region in total variation, as prime-rl trains by default.

L = 1/sum_i T_i sum_i sum_t [-k_t A_i rho_t + kl (log rho_t)^2], rho to the rollout policy, A_i = r_i - mean
k_t = 0 where A_i > 0 and pi - mu > bound_high, or A_i <= 0 and pi - mu < -bound_low
"""

from __future__ import annotations

from typing import ClassVar, Literal

from rollmill.config.advantage import AdvantageConfig, MeanBaseline
from rollmill.config.algorithm import PolicyGradientOptions
from rollmill.config.loss import DPPOTVLoss, LossConfig


class DPPO(PolicyGradientOptions):
    """DPPO-TV: tokens whose probability moved too far are dropped."""

    source: ClassVar[str] = "arXiv:2602.04879"

    name: Literal["dppo"] = "dppo"
    advantage: AdvantageConfig = MeanBaseline()
    loss: LossConfig = DPPOTVLoss()
