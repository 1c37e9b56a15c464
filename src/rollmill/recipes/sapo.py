"""SAPO: a soft gate instead of clipping.

L = 1/N sum_i 1/T_i sum_t -(4 / tau) sigmoid(tau (rho - 1)) A_i, A_i as in GRPO
"""

from __future__ import annotations

from typing import ClassVar, Literal

from rollmill.config.algorithm import Aggregation, PolicyGradientOptions
from rollmill.config.loss import LossConfig, SAPOLoss


class SAPO(PolicyGradientOptions):
    """SAPO: a sigmoid gate on the ratio."""

    source: ClassVar[str] = "arXiv:2511.20347"

    name: Literal["sapo"] = "sapo"
    loss: LossConfig = SAPOLoss()
    aggregation: Aggregation = "sequence-mean"
