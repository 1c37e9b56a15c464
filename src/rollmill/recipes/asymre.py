"""AsymRE: off-policy REINFORCE with a lowered baseline.

A_i = r_i - (mean - beta) within the group
L = 1/N sum_i sum_t -A_i log pi
"""

from __future__ import annotations

from typing import ClassVar, Literal

from rollmill.config.advantage import AdvantageConfig, ShiftedBaseline
from rollmill.config.algorithm import Aggregation, PolicyGradientOptions
from rollmill.config.loss import LossConfig, PolicyGradientLoss


class AsymRE(PolicyGradientOptions):
    """AsymRE: a baseline below the mean weights successes more than failures."""

    source: ClassVar[str] = "arXiv:2506.20520"

    name: Literal["asymre"] = "asymre"
    advantage: AdvantageConfig = ShiftedBaseline()
    loss: LossConfig = PolicyGradientLoss()
    aggregation: Aggregation = "sequence-sum-mean"
