"""CISPO: the importance weight is clipped, not the update, so every token keeps a gradient.

L = 1/sum_i T_i sum_i sum_t -sg(clip(rho)) A_i log pi, A_i as in GRPO
"""

from __future__ import annotations

from typing import ClassVar, Literal

from rollmill.config.algorithm import PolicyGradientOptions
from rollmill.config.loss import CISPOLoss, LossConfig


class CISPO(PolicyGradientOptions):
    """CISPO: clipped importance weights on A log pi."""

    source: ClassVar[str] = "arXiv:2506.13585"

    name: Literal["cispo"] = "cispo"
    loss: LossConfig = CISPOLoss()
