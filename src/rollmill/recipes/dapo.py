"""DAPO: GRPO's advantage, clip bounds .2 and .28, token mean, overlong penalty, uniform groups left out.

L = 1/sum_i T_i sum_i sum_t -min(rho A_i, clip(rho, .8, 1.28) A_i)

The penalty applies if `overlong_buffer` is given (published: a fifth of max_new_tokens). It is subtracted from the
reward before advantages are computed. Groups whose rewards are all equal are left out of the denominator. For dynamic
sampling, which replaces them by new rollouts, add the operator `group_variance` to `pipeline`.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from rollmill.config.algorithm import PolicyGradientOptions
from rollmill.config.loss import LossConfig, PPOClipLoss


class DAPO(PolicyGradientOptions):
    """DAPO: asymmetric clipping, token mean, uniform groups left out, optional overlong penalty."""

    source: ClassVar[str] = "arXiv:2503.14476"

    name: Literal["dapo"] = "dapo"
    loss: LossConfig = PPOClipLoss(clip_high=0.28)
    drop_uniform_groups: bool = True
