"""M2PO: the unclipped surrogate on tokens whose log-ratios have a small second moment, for very stale rollouts.

T = tokens with A_i > 0 and rho > 1, or A_i < 0 and rho < 1
m_t = 0 for the greatest (log rho)^2 of T, until the mean over the rest of T is at most .04 (algorithm 1)
L = 1/sum_i T_i sum_i sum_t -m_t rho A_i, A_i as in GRPO (eq. 5)

Needs one more forward pass per optimizer step: algorithm 1 sorts the tokens of the whole step.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from rollmill.config.algorithm import PolicyGradientOptions
from rollmill.config.loss import LossConfig, MaskConfig, SecondMomentMask, SurrogateLoss


class M2PO(PolicyGradientOptions):
    """M2PO: masks the tokens with the greatest log-ratios, without clipping."""

    source: ClassVar[str] = "arXiv:2510.01161"

    name: Literal["m2po"] = "m2po"
    loss: LossConfig = SurrogateLoss()
    masks: list[MaskConfig] = [SecondMomentMask()]
