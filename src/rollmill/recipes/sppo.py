"""SPPO: self-play preference optimisation; the log-ratio is fitted to the estimated chance of winning.

L = 1/N sum_i (sum_t log rho_t - A_i / beta)^2, A_i = r_i - mean

With 0/1 rewards A_i is twice the chance of winning against the group, less 1, where the paper has the chance less 1/2:
the factor is in beta.
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
