"""VESPO: a smooth weight of the whole completion's ratio instead of clipping, for stale rollouts.

W_i = prod_t pi / pi_rollout, phi(W) = W^k exp(lambda (1 - W)); k, lambda = 2, 3 where A_i >= 0, else 3, 2
L = 1/sum_i T_i sum_i sum_t -sg(phi(W_i)) A_i log pi, A_i as in GRPO
"""

from __future__ import annotations

from typing import ClassVar, Literal

from rollmill.config.algorithm import PolicyGradientOptions
from rollmill.config.loss import LossConfig, VESPOLoss


class VESPO(PolicyGradientOptions):
    """VESPO: -phi(W) A log pi, W the completion's ratio to the sampling policy."""

    source: ClassVar[str] = "arXiv:2602.10693"

    name: Literal["vespo"] = "vespo"
    loss: LossConfig = VESPOLoss()
