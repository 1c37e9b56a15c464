"""Optimal token baseline: a baseline per token, weighted by each completion's accumulated gradient so far.

W_jt = sum over k <= t of 1 - 2 pi(y_jk) + sum_v pi(v)^2, by the policy at the start of the step
A_it = r_i - sum_j W_jt r_j / sum_j W_jt, j over the completions of the group with a token t
L = 1/sum_i T_i sum_i sum_t -min(rho A_it, clip(rho) A_it)

The weights take one forward pass, which runs while rewards are computed. Formula and defaults are those of verl.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from rollmill.config.advantage import AdvantageConfig, OptimalTokenBaseline
from rollmill.config.algorithm import PolicyGradientOptions


class OTB(PolicyGradientOptions):
    """OTB: r minus a baseline per token, weighted by the size of the gradient so far."""

    source: ClassVar[str] = "arXiv:2602.07078"

    name: Literal["otb"] = "otb"
    advantage: AdvantageConfig = OptimalTokenBaseline()
