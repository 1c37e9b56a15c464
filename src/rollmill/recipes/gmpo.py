"""GMPO: the geometric mean of a completion's ratios instead of the arithmetic one.

c_t = min(log rho_t, .4) where A_i > 0, else max(log rho_t, -.4)
L = 1/N sum_i -A_i exp(1/T_i sum_t c_t), A_i as in GRPO
"""

from __future__ import annotations

from typing import ClassVar, Literal

from rollmill.config.algorithm import Aggregation, PolicyGradientOptions
from rollmill.config.loss import GMPOLoss, LossConfig


class GMPO(PolicyGradientOptions):
    """GMPO: geometric mean of individually clipped token ratios."""

    source: ClassVar[str] = "arXiv:2507.20673"

    name: Literal["gmpo"] = "gmpo"
    loss: LossConfig = GMPOLoss()
    aggregation: Aggregation = "sequence-mean"
