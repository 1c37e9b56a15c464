"""The 80/20 rule: DAPO's loss on the 20 % of tokens with the highest entropy, where the text may branch.

L = 1/sum_i T_i sum_i sum_t -1[H_t >= q] min(rho A_i, clip(rho, .8, 1.28) A_i)
q = the .8 quantile of the optimizer step's entropies

All tokens count in the denominator. Needs one more forward pass per optimizer step: the quantile is over the whole
step.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from rollmill.config.algorithm import PolicyGradientOptions
from rollmill.config.loss import HighEntropyMask, LossConfig, MaskConfig, PPOClipLoss


class HighEntropy(PolicyGradientOptions):
    """The 80/20 rule: DAPO's loss on the tokens with the highest entropy only."""

    source: ClassVar[str] = "arXiv:2506.01939"

    name: Literal["high_entropy"] = "high_entropy"
    loss: LossConfig = PPOClipLoss(clip_high=0.28)
    drop_uniform_groups: bool = True
    masks: list[MaskConfig] = [HighEntropyMask()]
