"""GDPO: several rewards, each normalised separately, so that none is drowned out by another's variance.

A = whiten(sum_k w_k grpo(r_k)) over the batch, w_k the weights of `rewards`
L = 1/N sum_i 1/T_i sum_t -min(rho A_i, clip(rho) A_i)
"""

from __future__ import annotations

from typing import ClassVar, Literal

from rollmill.config.advantage import AdvantageConfig, RewardPartsNormalised
from rollmill.config.algorithm import Aggregation, PolicyGradientOptions


class GDPO(PolicyGradientOptions):
    """GDPO: reward components normalised separately within the group."""

    source: ClassVar[str] = "arXiv:2601.05242"

    name: Literal["gdpo"] = "gdpo"
    advantage: AdvantageConfig = RewardPartsNormalised()
    aggregation: Aggregation = "sequence-mean"
