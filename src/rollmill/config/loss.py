"""`algorithm.loss`, `algorithm.masks` and `algorithm.corrections`: the policy loss, tokens that it excludes, and
importance weights. Each section names its function of `rollmill.algorithms`."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from rollmill.config.section import NamedSection, module_sections, section_union


class LossSection(NamedSection):
    """Base of policy losses. The class attributes declare the properties of a loss."""

    follows_advantage: ClassVar[bool] = True  #: the loss is 0, and so is its gradient, where the advantage is 0
    only_positive: ClassVar[bool] = False  #: and where the advantage is negative
    uses_old: ClassVar[bool] = True  #: uses the old log-probs
    to_rollout: ClassVar[bool] = False  #: its ratio is to the rollout policy
    clip_indicator: ClassVar[str] = ""  #: import path of the function that marks the tokens dropped by clipping
    selection: ClassVar[str] = ""
    """Import path of the function that chooses the tokens which the loss treats differently, over the whole optimizer
    step."""


class PPOClipLoss(LossSection):
    """-min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A), rho the ratio to the old policy (PPO)."""

    clip_indicator = "rollmill.algorithms.losses:clipped"
    implementation = "rollmill.algorithms.losses:ppo_clip"
    name: Literal["ppo_clip"] = "ppo_clip"
    clip_low: float = Field(0.2, ge=0)
    """Ratios below 1 - clip_low bring no further gain."""
    clip_high: float = Field(0.2, ge=0)
    """Ratios above 1 + clip_high bring no further gain."""
    dual_clip: float | None = Field(None, gt=1)
    """Upper bound c on the loss of tokens with negative advantage: max(.., c A)."""


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


class GMPOLoss(LossSection):
    """-A times the geometric mean of the completion's ratios, each clipped in log space (GMPO)."""

    clip_indicator = "rollmill.algorithms.sequence_losses:gmpo_clipped"
    implementation = "rollmill.algorithms.sequence_losses:gmpo"
    name: Literal["gmpo"] = "gmpo"
    clip_low: float = Field(0.4, ge=0)
    """Log-ratios below -clip_low bring no further gain."""
    clip_high: float = Field(0.4, ge=0)
    """Log-ratios above clip_high bring no further gain."""


class VESPOLoss(LossSection):
    """-phi(W) A log pi, phi(W) = W^k exp(lambda (1 - W)), W the completion's ratio to the rollout policy (VESPO)."""

    uses_old: ClassVar[bool] = False
    to_rollout: ClassVar[bool] = True

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


class SurrogateLoss(LossSection):
    """-rho A, without clipping (M2PO, with its mask)."""

    implementation = "rollmill.algorithms.losses:surrogate"
    name: Literal["surrogate"] = "surrogate"


class KLCovLoss(LossSection):
    """-rho A, plus a penalty |log rho| on the step's tokens whose log-prob and advantage covary most (KL-Cov)."""

    follows_advantage: ClassVar[bool] = False

    selection = "rollmill.algorithms.entropy:largest_covariance"
    implementation = "rollmill.algorithms.entropy:kl_cov"
    name: Literal["kl_cov"] = "kl_cov"
    share: float = Field(2e-4, gt=0, le=1)
    """Fraction of the step's tokens with the penalty; at least one."""
    coefficient: float = Field(1.0, ge=0)
    """Weight of the penalty."""


class CISPOLoss(LossSection):
    """-sg(clip(rho, 1 - clip_low, 1 + clip_high)) A log pi: the weight is clipped, not the update (CISPO)."""

    implementation = "rollmill.algorithms.losses:cispo"
    name: Literal["cispo"] = "cispo"
    clip_low: float = Field(1.0, ge=0, le=1)
    """Weights are at least 1 - clip_low; 1 is no bound."""
    clip_high: float = Field(4.0, ge=0)
    """Weights are at most 1 + clip_high."""


class SAPOLoss(LossSection):
    """-(4 / tau) sigmoid(tau (rho - 1)) A: a soft gate in place of clipping (SAPO)."""

    implementation = "rollmill.algorithms.losses:sapo"
    name: Literal["sapo"] = "sapo"
    tau_positive: float = Field(1.0, gt=0)
    """Steepness where the advantage is positive."""
    tau_negative: float = Field(1.05, gt=0)
    """Steepness where the advantage is zero or negative."""


class TOPRLoss(LossSection):
    """-w A log pi, w = 1 for A >= 0, else the completion's ratio, at most 1 (TOPR)."""

    implementation = "rollmill.algorithms.sequence_losses:topr"
    name: Literal["topr"] = "topr"


class OPMDLoss(LossSection):
    """-A log pi / (1 + tau) (OPMD)."""

    uses_old: ClassVar[bool] = False

    implementation = "rollmill.algorithms.losses:opmd"
    name: Literal["opmd"] = "opmd"
    tau: float = Field(1.0, ge=0)
    """Weight of the KL to the old policy that the update is derived with."""


class KimiMirrorLoss(LossSection):
    """(A - tau sum_t log rho_t)^2 per completion (Kimi k1.5)."""

    follows_advantage: ClassVar[bool] = False

    implementation = "rollmill.algorithms.sequence_losses:kimi_mirror"
    name: Literal["kimi_mirror"] = "kimi_mirror"
    tau: float = Field(0.1, gt=0)
    """Weight of the KL to the old policy that the update is derived with."""


class SPPOLoss(LossSection):
    """(sum_t log rho_t - A / beta)^2 per completion (self-play preference optimisation)."""

    follows_advantage: ClassVar[bool] = False

    implementation = "rollmill.algorithms.sequence_losses:sppo"
    name: Literal["sppo"] = "sppo"
    beta: float = Field(1e-3, gt=0)
    """Divisor of the advantages: 1 / eta of the paper."""


class SoftmaxPPOLoss(LossSection):
    """-A log clip(rho, 1 / (1 + clip), 1 + clip) (sPPO)."""

    implementation = "rollmill.algorithms.losses:softmax_ppo"
    name: Literal["softmax_ppo"] = "softmax_ppo"
    clip: float = Field(0.3, gt=0)
    """Clipping range of the ratio."""


class PolicyGradientLoss(LossSection):
    """-A log pi, without a ratio (REINFORCE, GPG, AsymRE)."""

    uses_old: ClassVar[bool] = False

    implementation = "rollmill.algorithms.losses:policy_gradient"
    name: Literal["policy_gradient"] = "policy_gradient"


class RAFTLoss(LossSection):
    """-log pi of the tokens with a positive advantage; the others are excluded from the denominator (RAFT)."""

    only_positive: ClassVar[bool] = True
    uses_old: ClassVar[bool] = False

    implementation = "rollmill.algorithms.losses:raft"
    name: Literal["raft"] = "raft"


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


class DPPOTVLoss(LossSection):
    """-A rho + kl (log rho)^2 of tokens whose probability has changed little; rho is the ratio to the rollout policy
    (DPPO)."""

    follows_advantage: ClassVar[bool] = False
    uses_old: ClassVar[bool] = False
    to_rollout: ClassVar[bool] = True

    clip_indicator = "rollmill.algorithms.trust_region:dppo_masked"
    implementation = "rollmill.algorithms.trust_region:dppo_tv"
    name: Literal["dppo_tv"] = "dppo_tv"
    bound_low: float = Field(0.2, ge=0)
    """Maximum decrease in probability of a token with A <= 0."""
    bound_high: float = Field(0.2, ge=0)
    """Maximum increase in probability of a token with A > 0."""
    kl: float = Field(1e-3, ge=0)
    """Weight of the squared log-ratio."""


if TYPE_CHECKING:
    LossConfig = LossSection
else:
    LossConfig = section_union(module_sections(__name__, LossSection), kind="loss")


# Masks: functions of `rollmill.algorithms.entropy` and `rollmill.algorithms.trust_region`


class MaskSection(NamedSection):
    """Base of masks, which choose the tokens of an optimizer step that the policy loss keeps. Masked tokens still count
    in the denominator."""

    uses_old: ClassVar[bool] = False  #: uses the old log-probs
    uses_expected_discriminant: ClassVar[bool] = False


class HighEntropyMask(MaskSection):
    """Keeps the tokens with the highest entropy (80/20 rule)."""

    implementation = "rollmill.algorithms.entropy:high_entropy"
    name: Literal["high_entropy"] = "high_entropy"
    top: float = Field(0.2, gt=0, le=1)
    """Fraction of the step's tokens to keep."""


class ClipBMask(MaskSection):
    """Excludes tokens with A < 0 whose update would lower the entropy far more than the step's mean (Clip_B)."""

    implementation = "rollmill.algorithms.entropy:clip_b"
    name: Literal["clip_b"] = "clip_b"
    mu: float = Field(2.5, ge=0)
    """Accepted distance below the step's mean of p (H + log p), in standard deviations."""


class ClipVMask(MaskSection):
    """Like `clip_b`, but compares each token with the vocabulary at its own position (Clip_V)."""

    uses_expected_discriminant: ClassVar[bool] = True

    implementation = "rollmill.algorithms.entropy:clip_v"
    name: Literal["clip_v"] = "clip_v"
    mu: float = Field(8.5, ge=0)
    """Accepted size of the difference, in standard deviations."""
    max_share: float = Field(1e-4, ge=0, le=1)
    """Maximum fraction of the step's tokens to exclude, but always at least one."""


class ClipCovMask(MaskSection):
    """Excludes a few random tokens whose log-prob and advantage covary (Clip-Cov)."""

    uses_old: ClassVar[bool] = True

    implementation = "rollmill.algorithms.entropy:clip_cov"
    name: Literal["clip_cov"] = "clip_cov"
    share: float = Field(2e-4, gt=0, le=1)
    """Fraction of the step's tokens to exclude; at least one."""
    low: float = 1.0
    """Tokens with a covariance of at most this are kept."""
    high: float = 5.0
    """Tokens with a covariance of at least this are kept."""


class SecondMomentMask(MaskSection):
    """Excludes the tokens with the largest log-ratios until their second moment is small (M2PO)."""

    uses_old: ClassVar[bool] = True

    implementation = "rollmill.algorithms.trust_region:second_moment"
    name: Literal["second_moment"] = "second_moment"
    threshold: float = Field(0.04, ge=0)
    """Accepted mean squared log-ratio of tokens whose update moves them further from the old policy."""


if TYPE_CHECKING:
    MaskConfig = MaskSection
else:
    MaskConfig = section_union(module_sections(__name__, MaskSection))


# Corrections: functions of `rollmill.algorithms.corrections`


class CorrectionSection(NamedSection):
    """Base of importance corrections: a weight per token, from x = old / rollout probability. Several are
    multiplied."""


class TokenTIS(CorrectionSection):
    """min(x, cap) per token: truncated importance sampling."""

    implementation = "rollmill.algorithms.corrections:truncated_importance"
    name: Literal["tis"] = "tis"
    cap: float = Field(2.0, gt=0)
    """Upper bound of the weights."""


class SequenceTIS(CorrectionSection):
    """min(product of the completion's x, cap)."""

    implementation = "rollmill.algorithms.corrections:sequence_truncated_importance"
    name: Literal["sequence_tis"] = "sequence_tis"
    cap: float = Field(2.0, gt=0)
    """Upper bound of the weights."""


class TokenMIS(CorrectionSection):
    """x within [low, high], else 0 (IcePop, MIS)."""

    implementation = "rollmill.algorithms.corrections:masked_importance"
    name: Literal["mis"] = "mis"
    low: float = Field(0.5, ge=0)
    """Smaller weights become 0."""
    high: float = Field(5.0, gt=0)
    """Larger weights become 0."""


class SequenceMIS(CorrectionSection):
    """The product of the completion's x within [low, high], else 0."""

    implementation = "rollmill.algorithms.corrections:sequence_masked_importance"
    name: Literal["sequence_mis"] = "sequence_mis"
    low: float = Field(0.5, ge=0)
    """Smaller weights become 0."""
    high: float = Field(5.0, gt=0)
    """Larger weights become 0."""


class GeometricRejection(CorrectionSection):
    """1 where the geometric mean of the completion's x lies within [low, high], else 0."""

    implementation = "rollmill.algorithms.corrections:geometric_rejection"
    name: Literal["geometric"] = "geometric"
    low: float = Field(0.999, ge=0)
    """Completions with a smaller mean are excluded."""
    high: float = Field(1.001, gt=0)
    """Completions with a larger mean are excluded."""


class K3Rejection(CorrectionSection):
    """1 where the completion's mean k3 between rollout and old policy is at most `bound`, else 0."""

    implementation = "rollmill.algorithms.corrections:k3_rejection"
    name: Literal["k3"] = "k3"
    bound: float = Field(0.01, gt=0)
    """Completions with a larger mean are excluded."""


class DecoupledCorrection(CorrectionSection):
    """x up to `cap` (decoupled PPO, AReaL)."""

    implementation = "rollmill.algorithms.corrections:decoupled_importance"
    name: Literal["decoupled"] = "decoupled"
    cap: float = Field(5.0, gt=0)
    """Largest accepted weight."""
    beyond: Literal["mask", "cap"] = "mask"
    """Replacement of larger weights: 0 (`mask`), or `cap`."""


class OffPolicyMask(CorrectionSection):
    """0 for completions with negative advantage whose mean log(rollout / policy) exceeds `delta`, else 1."""

    implementation = "rollmill.algorithms.corrections:off_policy_sequence_mask"
    name: Literal["off_policy_mask"] = "off_policy_mask"
    delta: float = Field(0.1, ge=0)
    """Largest accepted mean of log(rollout) - log(policy), in nats."""


if TYPE_CHECKING:
    CorrectionConfig = CorrectionSection
else:
    CorrectionConfig = section_union(module_sections(__name__, CorrectionSection))
