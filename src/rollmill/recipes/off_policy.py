"""TOPR: tapered off-policy REINFORCE, stable on old data.

L = 1/N sum_i sum_t -w_i A_i log pi; w_i = 1 where A_i >= 0, else min(prod_t rho_t, 1); A_i = r_i - mean
"""

from __future__ import annotations

from typing import ClassVar, Literal

from rollmill.config.advantage import AdvantageConfig, MeanBaseline
from rollmill.config.algorithm import Aggregation, PolicyGradientOptions
from rollmill.config.loss import LossConfig, TOPRLoss


class TOPR(PolicyGradientOptions):
    """TOPR: full weight for good completions, the truncated ratio for bad ones."""

    source: ClassVar[str] = "arXiv:2503.14286"

    name: Literal["topr"] = "topr"
    advantage: AdvantageConfig = MeanBaseline()
    loss: LossConfig = TOPRLoss()
    aggregation: Aggregation = "sequence-sum-mean"
    proximal: Literal["auto", "rollout", "recompute", "interpolate"] = "rollout"
