"""Clip_B: GRPO without the tokens whose update would lower the entropy most, compared with the batch.

S_t = p_t (H_t + log p_t): raising the token's logit by e changes the entropy by -e S_t (theorem 3.2)
L = 1/sum_i T_i sum_i sum_t -m_t min(rho A_i, clip(rho) A_i); m_t = 0 where A_i < 0 and S_t < mean - 2.5 std of the step

One-sided, with the defaults of Trinity-RFT; there masked tokens leave the denominator, too, here they stay in it. Needs
one more forward pass per optimizer step.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from rollmill.config.algorithm import PolicyGradientOptions
from rollmill.config.loss import ClipBMask, MaskConfig


class ClipB(PolicyGradientOptions):
    """Clip_B: masks penalised tokens whose update would lower the entropy most."""

    source: ClassVar[str] = "arXiv:2602.03392"

    name: Literal["clip_b"] = "clip_b"
    masks: list[MaskConfig] = [ClipBMask()]
