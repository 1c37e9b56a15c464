"""GPG: the plain group policy gradient; groups with equal rewards do not count in the denominator.

L = 1/sum_i T_i sum_i sum_t -A_i log pi, A_i = r_i - mean within the group, over groups with differing rewards
"""

from __future__ import annotations

from typing import ClassVar, Literal

from rollmill.config.advantage import AdvantageConfig, MeanBaseline
from rollmill.config.algorithm import PolicyGradientOptions
from rollmill.config.loss import LossConfig, PolicyGradientLoss


class GPG(PolicyGradientOptions):
    """GPG: -A log pi, no ratio, no reference, uniform groups left out."""

    source: ClassVar[str] = "arXiv:2504.02546"

    name: Literal["gpg"] = "gpg"
    advantage: AdvantageConfig = MeanBaseline()
    loss: LossConfig = PolicyGradientLoss()
    drop_uniform_groups: bool = True
