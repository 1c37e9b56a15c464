"""REINFORCE++-baseline: the group's mean as baseline, normalised over the whole batch, k2 penalty in the loss.

A_i = (a_i - mean) / (std + eps) over the batch's tokens, a_i = r_i - mean within the group
L = 1/sum_i T_i sum_i sum_t [-min(rho A_i, clip(rho) A_i) + kl k2]
"""

from __future__ import annotations

from typing import ClassVar, Literal

from rollmill.config.advantage import AdvantageConfig, BatchNormalised
from rollmill.config.algorithm import KLOptions, PolicyGradientOptions


class ReinforcePlusPlusBaseline(PolicyGradientOptions):
    """REINFORCE++-baseline: r - mean within the group, normalised over the batch."""

    source: ClassVar[str] = "arXiv:2501.03262"

    name: Literal["reinforce_plus_plus_baseline"] = "reinforce_plus_plus_baseline"
    advantage: AdvantageConfig = BatchNormalised(baseline="group")
    kl: KLOptions = KLOptions(coefficient=0.01, estimator="k2")
