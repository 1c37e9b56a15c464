"""REINFORCE with the batch's mean reward as baseline, or none; the ratio is clipped as in PPO.

A_i = r_i - mean over the batch
L = 1/sum_i T_i sum_i sum_t -min(rho A_i, clip(rho) A_i)
"""

from __future__ import annotations

from typing import ClassVar, Literal

from rollmill.config.advantage import AdvantageConfig, BatchBaseline
from rollmill.config.algorithm import PolicyGradientOptions


class Reinforce(PolicyGradientOptions):
    """REINFORCE with the batch mean as baseline."""

    source: ClassVar[str] = "Williams 1992"

    name: Literal["reinforce"] = "reinforce"
    advantage: AdvantageConfig = BatchBaseline()
