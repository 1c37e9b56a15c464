"""Clip-Cov: GRPO without a few random tokens whose log-prob and advantage covary, which drive the entropy down.

cov_t = (log pi - mean) (A - mean), means over the tokens of the optimizer step
L = 1/sum_i T_i sum_i sum_t -m_t min(rho A_i, clip(rho) A_i)
m_t = 0 for .0002 of the tokens, drawn at random where 1 < cov_t < 5

One forward pass more per optimizer step: the covariances are those of the whole step, whatever the micro-batches are.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from rollmill.config.algorithm import PolicyGradientOptions
from rollmill.config.loss import ClipCovMask, MaskConfig


class ClipCov(PolicyGradientOptions):
    """Clip-Cov: leaves out a few tokens with a high covariance of log-prob and advantage."""

    source: ClassVar[str] = "arXiv:2505.22617"

    name: Literal["clip_cov"] = "clip_cov"
    masks: list[MaskConfig] = [ClipCovMask()]
