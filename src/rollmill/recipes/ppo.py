"""PPO with a critic and generalized advantage estimation.

A_t = sum_k (gamma lam)^k delta_{t+k}, delta_t = r_t + gamma V_{t+1} - V_t, normalised over the batch's tokens
L = 1/sum_i T_i sum_i sum_t -min(rho A_t, clip(rho) A_t)
L_V = 1/sum_i T_i sum_i sum_t .5 max((V - R)^2, (clip(V, V_old +- value_clip) - R)^2)

The reward is placed on a completion's last token. VC-PPO and VAPO: `critic.warmup_steps`, `advantage.length_alpha:
0.05`.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from rollmill.config.advantage import GAE, AdvantageConfig
from rollmill.config.algorithm import PolicyGradientOptions


class PPO(PolicyGradientOptions):
    """PPO: advantages from a critic (GAE), clipped surrogate, clipped value loss."""

    source: ClassVar[str] = "arXiv:1707.06347"

    name: Literal["ppo"] = "ppo"
    advantage: AdvantageConfig = GAE()
