"""GSPO: one importance ratio per completion.

s_i = exp(1/T_i sum_t log rho_t)
L = 1/N sum_i -min(s_i A_i, clip(s_i) A_i), A_i as in GRPO
"""

from __future__ import annotations

from typing import ClassVar, Literal

from rollmill.config.algorithm import Aggregation, PolicyGradientOptions
from rollmill.config.loss import GSPOLoss, LossConfig


class GSPO(PolicyGradientOptions):
    """GSPO: completions' geometric-mean ratios, clipped."""

    source: ClassVar[str] = "arXiv:2507.18071"

    name: Literal["gspo"] = "gspo"
    loss: LossConfig = GSPOLoss()
    aggregation: Aggregation = "sequence-mean"
