"""Clip_V: as Clip_B, but each token is compared with the mean over the vocabulary at its position.

D_t = sum_v p_v S_v - S_t, S_v = p_v (H_t + log p_v)
L = 1/sum_i T_i sum_i sum_t -m_t min(rho A_i, clip(rho) A_i); m_t = 0 where A_i < 0 and D_t > 8.5 std of the step

At most .0001 of the tokens (but always up to one) are masked, those with the greatest D_t. One-sided, with the
defaults of Trinity-RFT; the denominator and the forward pass as in `clip_b`.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from rollmill.config.algorithm import PolicyGradientOptions
from rollmill.config.loss import ClipVMask, MaskConfig


class ClipV(PolicyGradientOptions):
    """Clip_V: as Clip_B, relative to the mean over the vocabulary."""

    source: ClassVar[str] = "arXiv:2602.03392"

    name: Literal["clip_v"] = "clip_v"
    masks: list[MaskConfig] = [ClipVMask()]
