"""Dr. GRPO: GRPO without the two biases of its normalisations.

A_i = r_i - mean within the group
L = 1/(N max_new_tokens) sum_i sum_t -min(rho A_i, clip(rho) A_i): a constant, whatever the lengths or the padding
"""

from __future__ import annotations

from typing import ClassVar, Literal

from rollmill.config.advantage import AdvantageConfig, MeanBaseline
from rollmill.config.algorithm import Aggregation, PolicyGradientOptions


class DrGRPO(PolicyGradientOptions):
    """Dr. GRPO: r - mean, no length normalisation, constant denominator."""

    source: ClassVar[str] = "arXiv:2503.20783"

    name: Literal["dr_grpo"] = "dr_grpo"
    advantage: AdvantageConfig = MeanBaseline()
    aggregation: Aggregation = "constant"
