"""RLOO: REINFORCE with the mean of the other completions as baseline; unbiased on policy.

A_i = r_i - mean of r_j, j != i, within the group
L = 1/N sum_i sum_t -min(rho A_i, clip(rho) A_i)

Tokens are summed: a mean over tokens would divide by random lengths, which biases the estimate.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from rollmill.config.advantage import AdvantageConfig, LeaveOneOut
from rollmill.config.algorithm import Aggregation, PolicyGradientOptions


class RLOO(PolicyGradientOptions):
    """RLOO: r_i minus the mean of the other rewards of its group, summed over tokens."""

    source: ClassVar[str] = "arXiv:2402.14740"

    name: Literal["rloo"] = "rloo"
    advantage: AdvantageConfig = LeaveOneOut()
    aggregation: Aggregation = "sequence-sum-mean"
