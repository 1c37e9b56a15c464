"""Tokens that have moved too far from the old policy are dropped."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from rollmill.config.algorithms.base import LossSection, MaskSection, PolicyGradientOptions
from rollmill.config.algorithms.baselines import MeanBaseline

if TYPE_CHECKING:
    from rollmill.config.algorithms.base import AdvantageConfig, LossConfig, MaskConfig


class RECLoss(LossSection):
    """-A log pi, optionally weighted by the ratio, of tokens whose ratio is within bounds (the REC family)."""

    clip_indicator = "rollmill.algorithms.trust_region:rec_clipped"
    implementation = "rollmill.algorithms.trust_region:rec"
    name: Literal["rec"] = "rec"
    clip: Literal["one-side", "two-side", "ring"] = "one-side"
    """Tokens outside the bounds that are dropped. `one-side`: those on the advantage's side. `two-side`: all. `ring`:
    all but the far ones where the advantage corrects."""
    importance: bool = False
    """Whether to weight by the ratio."""
    clip_low: float = Field(0.2, ge=0)
    """Tokens with a ratio below 1 - clip_low are outside."""
    clip_high: float = Field(0.2, ge=0)
    """Tokens with a ratio above 1 + clip_high are outside."""
    far_low: float = Field(0.6, ge=0)
    """With `ring`: ratios up to 1 - far_low are far."""
    far_high: float = Field(2.0, ge=0)
    """With `ring`: ratios from 1 + far_high are far."""


class REC(PolicyGradientOptions):
    """The REC family: group-relative REINFORCE, only on tokens within bounds."""

    source = "arXiv:2509.24203"
    formula = """
    REC: group-relative REINFORCE with clipping as regularisation (REC-OneSide-NoIS by default).

    L = 1/sum_i T_i sum_i sum_t -m_t w_t A_i log pi, A_i = r_i - mean; m, w: see `loss`
    """

    name: Literal["rec"] = "rec"
    advantage: AdvantageConfig = MeanBaseline()
    loss: LossConfig = RECLoss()


class DPPOTVLoss(LossSection):
    """-A rho + kl (log rho)^2 of tokens whose probability has changed little; rho is the ratio to the rollout policy
    (DPPO)."""

    follows_advantage = False
    uses_old = False
    to_rollout = True

    clip_indicator = "rollmill.algorithms.trust_region:dppo_masked"
    implementation = "rollmill.algorithms.trust_region:dppo_tv"
    name: Literal["dppo_tv"] = "dppo_tv"
    bound_low: float = Field(0.2, ge=0)
    """Maximum decrease in probability of a token with A <= 0."""
    bound_high: float = Field(0.2, ge=0)
    """Maximum increase in probability of a token with A > 0."""
    kl: float = Field(1e-3, ge=0)
    """Weight of the squared log-ratio."""


class DPPO(PolicyGradientOptions):
    """DPPO-TV: tokens whose probability moved too far are dropped."""

    source = "arXiv:2602.04879"
    formula = """
    DPPO with a trust region in total variation, as prime-rl trains by default.

    L = 1/sum_i T_i sum_i sum_t [-k_t A_i rho_t + kl (log rho_t)^2], rho to the rollout policy, A_i = r_i - mean
    k_t = 0 where A_i > 0 and pi - mu > bound_high, or A_i <= 0 and pi - mu < -bound_low
    """

    name: Literal["dppo"] = "dppo"
    advantage: AdvantageConfig = MeanBaseline()
    loss: LossConfig = DPPOTVLoss()


class SurrogateLoss(LossSection):
    """-rho A, without clipping (M2PO, with its mask)."""

    implementation = "rollmill.algorithms.losses:surrogate"
    name: Literal["surrogate"] = "surrogate"


class SecondMomentMask(MaskSection):
    """Excludes the tokens with the largest log-ratios until their second moment is small (M2PO)."""

    uses_old = True

    implementation = "rollmill.algorithms.trust_region:second_moment"
    name: Literal["second_moment"] = "second_moment"
    threshold: float = Field(0.04, ge=0)
    """Accepted mean squared log-ratio of tokens whose update moves them further from the old policy."""


class M2PO(PolicyGradientOptions):
    """M2PO: masks the tokens with the greatest log-ratios, without clipping."""

    source = "arXiv:2510.01161"
    formula = """
    M2PO: the unclipped surrogate on tokens whose log-ratios have a small second moment, for very stale rollouts.

    T = tokens with A_i > 0 and rho > 1, or A_i < 0 and rho < 1
    m_t = 0 for the greatest (log rho)^2 of T, until the mean over the rest of T is at most .04 (algorithm 1)
    L = 1/sum_i T_i sum_i sum_t -m_t rho A_i, A_i as in GRPO (eq. 5)

    Needs one more forward pass per optimizer step: algorithm 1 sorts the tokens of the whole step.
    """

    name: Literal["m2po"] = "m2po"
    loss: LossConfig = SurrogateLoss()
    masks: list[MaskConfig] = [SecondMomentMask()]
