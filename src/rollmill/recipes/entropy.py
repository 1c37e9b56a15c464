"""Clip-Cov: GRPO without a few random tokens whose log-prob and advantage covary, which lower the entropy.

cov_t = (log pi - mean) (A - mean), means over the tokens of the optimizer step
L = 1/sum_i T_i sum_i sum_t -m_t min(rho A_i, clip(rho) A_i)
m_t = 0 for .0002 of the tokens, drawn at random where 1 < cov_t < 5

Needs one more forward pass per optimizer step: covariances are over the whole step, across micro-batches.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from rollmill.config.algorithm import PolicyGradientOptions
from rollmill.config.loss import ClipCovMask, MaskConfig


class ClipCov(PolicyGradientOptions):
    """Clip-Cov: masks a few tokens with a high covariance of log-prob and advantage."""

    source: ClassVar[str] = "arXiv:2505.22617"

    name: Literal["clip_cov"] = "clip_cov"
    masks: list[MaskConfig] = [ClipCovMask()]
