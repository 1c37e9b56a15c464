"""SPPO: self-play preference optimisation; the log-ratio is fitted to the estimated win probability.

L = 1/N sum_i (sum_t log rho_t - A_i / beta)^2, A_i = r_i - mean

With 0/1 rewards A_i is twice the win probability against the group minus 1; the paper has the probability minus 1/2.
beta absorbs the factor.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from rollmill.config.advantage import AdvantageConfig, MeanBaseline
from rollmill.config.algorithm import Aggregation, PolicyGradientOptions
from rollmill.config.loss import LossConfig, SPPOLoss


class SPPO(PolicyGradientOptions):
    """SPPO: completions' log-ratios fitted to A / beta."""

    source: ClassVar[str] = "arXiv:2405.00675"

    name: Literal["sppo"] = "sppo"
    advantage: AdvantageConfig = MeanBaseline()
    loss: LossConfig = SPPOLoss()
    aggregation: Aggregation = "sequence-mean"
