"""REINFORCE++: rewards minus a KL penalty, normalised over the whole batch.

A_t = (G_t - mean) / (std + eps) over the batch's tokens, G_t = r_i - kl sum_{k >= t} k1_k
L = 1/sum_i T_i sum_i sum_t -min(rho A_i, clip(rho) A_i)
"""

from __future__ import annotations

from typing import ClassVar, Literal

from rollmill.config.advantage import AdvantageConfig, BatchNormalised
from rollmill.config.algorithm import KLOptions, PolicyGradientOptions


class ReinforcePlusPlus(PolicyGradientOptions):
    """REINFORCE++: the KL penalty inside the reward, advantages normalised over the batch."""

    source: ClassVar[str] = "arXiv:2501.03262"

    name: Literal["reinforce_plus_plus"] = "reinforce_plus_plus"
    advantage: AdvantageConfig = BatchNormalised()
    kl: KLOptions = KLOptions(coefficient=0.01, estimator="k1", where="reward")
