"""Importance ratios other than PPO's: of whole completions, of clipped weights, with a soft gate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from rollmill.config.algorithms.base import Aggregation, LossSection, PolicyGradientOptions

if TYPE_CHECKING:
    from rollmill.config.algorithms.base import LossConfig


class GSPOLoss(LossSection):
    """PPO's clipped term with one ratio per completion, the geometric mean of its tokens' (GSPO)."""

    clip_indicator = "rollmill.algorithms.sequence_losses:gspo_clipped"
    implementation = "rollmill.algorithms.sequence_losses:gspo"
    name: Literal["gspo"] = "gspo"
    clip_low: float = Field(3e-4, ge=0)
    """Ratios below 1 - clip_low bring no further gain."""
    clip_high: float = Field(4e-4, ge=0)
    """Ratios above 1 + clip_high bring no further gain."""


class GSPOTokenLoss(GSPOLoss):
    """GSPO for advantages that differ between a completion's tokens."""

    implementation = "rollmill.algorithms.sequence_losses:gspo_token"
    name: Literal["gspo_token"] = "gspo_token"  # type: ignore[assignment]


class GSPO(PolicyGradientOptions):
    """GSPO: completions' geometric-mean ratios, clipped."""

    source = "arXiv:2507.18071"
    formula = """
    GSPO: one importance ratio per completion.

    s_i = exp(1/T_i sum_t log rho_t)
    L = 1/N sum_i -min(s_i A_i, clip(s_i) A_i), A_i as in GRPO
    """

    name: Literal["gspo"] = "gspo"
    loss: LossConfig = GSPOLoss()
    aggregation: Aggregation = "sequence-mean"


class GMPOLoss(LossSection):
    """-A times the geometric mean of the completion's ratios, each clipped in log space (GMPO)."""

    clip_indicator = "rollmill.algorithms.sequence_losses:gmpo_clipped"
    implementation = "rollmill.algorithms.sequence_losses:gmpo"
    name: Literal["gmpo"] = "gmpo"
    clip_low: float = Field(0.4, ge=0)
    """Log-ratios below -clip_low bring no further gain."""
    clip_high: float = Field(0.4, ge=0)
    """Log-ratios above clip_high bring no further gain."""


class GMPO(PolicyGradientOptions):
    """GMPO: geometric mean of individually clipped token ratios."""

    source = "arXiv:2507.20673"
    formula = """
    GMPO: the geometric mean of a completion's ratios instead of the arithmetic one.

    c_t = min(log rho_t, .4) where A_i > 0, else max(log rho_t, -.4)
    L = 1/N sum_i -A_i exp(1/T_i sum_t c_t), A_i as in GRPO
    """

    name: Literal["gmpo"] = "gmpo"
    loss: LossConfig = GMPOLoss()
    aggregation: Aggregation = "sequence-mean"


class CISPOLoss(LossSection):
    """-sg(clip(rho, 1 - clip_low, 1 + clip_high)) A log pi: the weight is clipped, not the update (CISPO)."""

    implementation = "rollmill.algorithms.losses:cispo"
    name: Literal["cispo"] = "cispo"
    clip_low: float = Field(1.0, ge=0, le=1)
    """Weights are at least 1 - clip_low; 1 is no bound."""
    clip_high: float = Field(4.0, ge=0)
    """Weights are at most 1 + clip_high."""


class CISPO(PolicyGradientOptions):
    """CISPO: clipped importance weights on A log pi."""

    source = "arXiv:2506.13585"
    formula = """
    CISPO: the importance weight is clipped, not the update, so every token keeps a gradient.

    L = 1/sum_i T_i sum_i sum_t -sg(clip(rho)) A_i log pi, A_i as in GRPO
    """

    name: Literal["cispo"] = "cispo"
    loss: LossConfig = CISPOLoss()


class SAPOLoss(LossSection):
    """-(4 / tau) sigmoid(tau (rho - 1)) A: a soft gate in place of clipping (SAPO)."""

    implementation = "rollmill.algorithms.losses:sapo"
    name: Literal["sapo"] = "sapo"
    tau_positive: float = Field(1.0, gt=0)
    """Steepness where the advantage is positive."""
    tau_negative: float = Field(1.05, gt=0)
    """Steepness where the advantage is zero or negative."""


class SAPO(PolicyGradientOptions):
    """SAPO: a sigmoid gate on the ratio."""

    source = "arXiv:2511.20347"
    formula = """
    SAPO: a soft gate instead of clipping.

    L = 1/N sum_i 1/T_i sum_t -(4 / tau) sigmoid(tau (rho - 1)) A_i, A_i as in GRPO
    """

    name: Literal["sapo"] = "sapo"
    loss: LossConfig = SAPOLoss()
    aggregation: Aggregation = "sequence-mean"


class VESPOLoss(LossSection):
    """-phi(W) A log pi, phi(W) = W^k exp(lambda (1 - W)), W the completion's ratio to the rollout policy (VESPO)."""

    uses_old = False
    to_rollout = True

    implementation = "rollmill.algorithms.sequence_losses:vespo"
    name: Literal["vespo"] = "vespo"
    k_positive: float = Field(2.0, ge=0)
    """k where the advantage is not negative: how fast small ratios are suppressed."""
    lambda_positive: float = Field(3.0, ge=0)
    """lambda where the advantage is not negative: how fast large ratios are suppressed."""
    k_negative: float = Field(3.0, ge=0)
    """k where the advantage is negative."""
    lambda_negative: float = Field(2.0, ge=0)
    """lambda where the advantage is negative."""


class VESPO(PolicyGradientOptions):
    """VESPO: -phi(W) A log pi, W the completion's ratio to the sampling policy."""

    source = "arXiv:2602.10693"
    formula = """
    VESPO: a smooth weight of the whole completion's ratio instead of clipping, for stale rollouts.

    W_i = prod_t pi / pi_rollout, phi(W) = W^k exp(lambda (1 - W)); k, lambda = 2, 3 where A_i >= 0, else 3, 2
    L = 1/sum_i T_i sum_i sum_t -sg(phi(W_i)) A_i log pi, A_i as in GRPO
    """

    name: Literal["vespo"] = "vespo"
    loss: LossConfig = VESPOLoss()
