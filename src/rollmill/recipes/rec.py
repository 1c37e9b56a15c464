"""REC: group-relative REINFORCE with clipping as regularisation (REC-OneSide-NoIS by default).

L = 1/sum_i T_i sum_i sum_t -m_t w_t A_i log pi, A_i = r_i - mean; m, w: see `loss`
"""

from __future__ import annotations

from typing import ClassVar, Literal

from rollmill.config.advantage import AdvantageConfig, MeanBaseline
from rollmill.config.algorithm import PolicyGradientOptions
from rollmill.config.loss import LossConfig, RECLoss


class REC(PolicyGradientOptions):
    """The REC family: group-relative REINFORCE, only on tokens within bounds."""

    source: ClassVar[str] = "arXiv:2509.24203"

    name: Literal["rec"] = "rec"
    advantage: AdvantageConfig = MeanBaseline()
    loss: LossConfig = RECLoss()
