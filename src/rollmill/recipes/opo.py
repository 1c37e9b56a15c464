"""OPO: exact on-policy policy gradient with the minimum-variance baseline, a mean weighted by length.

A_i = r_i - sum_j T_j r_j / sum_j T_j within the group
L = 1/N sum_i sum_t -A_i log pi

Intended for one update per batch, without KL and entropy bonus.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from rollmill.config.advantage import AdvantageConfig, OptimalBaseline
from rollmill.config.algorithm import Aggregation, PolicyGradientOptions
from rollmill.config.loss import LossConfig, PolicyGradientLoss


class OPO(PolicyGradientOptions):
    """OPO: r minus the length-weighted mean of the group, -A log pi."""

    source: ClassVar[str] = "arXiv:2505.23585"

    name: Literal["opo"] = "opo"
    advantage: AdvantageConfig = OptimalBaseline()
    loss: LossConfig = PolicyGradientLoss()
    aggregation: Aggregation = "sequence-sum-mean"
