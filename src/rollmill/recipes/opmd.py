"""OPMD: online policy mirror descent, as simplified by Trinity-RFT: no ratio, no clipping.

A_i = r_i - mean within the group, or r_i - tau log(mean(exp(r / tau))) (`advantage: {name: opmd, baseline: logavgexp}`)
L = 1/sum_i T_i sum_i sum_t -A_i log pi / (1 + tau)
"""

from __future__ import annotations

from typing import ClassVar, Literal

from rollmill.config.advantage import AdvantageConfig, MirrorBaseline
from rollmill.config.algorithm import PolicyGradientOptions
from rollmill.config.loss import LossConfig, OPMDLoss


class OPMD(PolicyGradientOptions):
    """OPMD: r - mean within the group, -A log pi / (1 + tau)."""

    source: ClassVar[str] = "arXiv:2505.17826"

    name: Literal["opmd"] = "opmd"
    advantage: AdvantageConfig = MirrorBaseline()
    loss: LossConfig = OPMDLoss()
