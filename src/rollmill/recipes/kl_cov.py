"""KL-Cov: the unclipped surrogate, with a penalty on the tokens whose log-prob and advantage covary most.

cov_t = (log pi - mean) (A - mean), means over the tokens of the optimizer step
L = 1/sum_i T_i sum_i sum_t [-rho A_i + abs(log rho) on the .0002 of the tokens with the largest cov_t]

Needs several updates per batch, or stale rollouts: in a first update rho is 1, and the penalty is 0. Needs one more
forward pass per optimizer step, as `clip_cov`.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from rollmill.config.algorithm import PolicyGradientOptions
from rollmill.config.loss import KLCovLoss, LossConfig


class KLCov(PolicyGradientOptions):
    """KL-Cov: a penalty on the tokens with the largest covariance of log-prob and advantage."""

    source: ClassVar[str] = "arXiv:2505.22617"

    name: Literal["kl_cov"] = "kl_cov"
    loss: LossConfig = KLCovLoss()
