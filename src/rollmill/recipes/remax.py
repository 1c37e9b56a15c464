"""ReMax: REINFORCE with the reward of the greedy completion as baseline.

A_i = r_i - r(greedy completion of the same prompt)
L = 1/N sum_i sum_t -A_i log pi

Rolls out one greedy completion per task besides the group.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from rollmill.config.advantage import AdvantageConfig, GreedyBaseline
from rollmill.config.algorithm import Aggregation, PolicyGradientOptions
from rollmill.config.loss import LossConfig, PolicyGradientLoss


class ReMax(PolicyGradientOptions):
    """ReMax: r minus the reward of the greedy completion of the same prompt."""

    source: ClassVar[str] = "arXiv:2310.10505"

    name: Literal["remax"] = "remax"
    advantage: AdvantageConfig = GreedyBaseline()
    loss: LossConfig = PolicyGradientLoss()
    aggregation: Aggregation = "sequence-sum-mean"
