"""Control of the policy's entropy: by a mask, by a penalty on some tokens, or by a bonus."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from rollmill.config.algorithms.base import EntropyControl, LossSection, MaskSection, PolicyGradientOptions, PPOClipLoss

if TYPE_CHECKING:
    from rollmill.config.algorithms.base import LossConfig, MaskConfig


class ClipCovMask(MaskSection):
    """Excludes a few random tokens whose log-prob and advantage covary (Clip-Cov)."""

    uses_old = True

    implementation = "rollmill.algorithms.entropy:clip_cov"
    name: Literal["clip_cov"] = "clip_cov"
    share: float = Field(2e-4, gt=0, le=1)
    """Fraction of the step's tokens to exclude; at least one."""
    low: float = 1.0
    """Tokens with a covariance of at most this are kept."""
    high: float = 5.0
    """Tokens with a covariance of at least this are kept."""


class ClipCov(PolicyGradientOptions):
    """Clip-Cov: masks a few tokens with a high covariance of log-prob and advantage."""

    source = "arXiv:2505.22617"
    formula = """
    Clip-Cov: GRPO without a few random tokens whose log-prob and advantage covary, which lower the entropy.

    cov_t = (log pi - mean) (A - mean), means over the tokens of the optimizer step
    L = 1/sum_i T_i sum_i sum_t -m_t min(rho A_i, clip(rho) A_i)
    m_t = 0 for .0002 of the tokens, drawn at random where 1 < cov_t < 5

    Needs one more forward pass per optimizer step: covariances are over the whole step, across micro-batches.
    """

    name: Literal["clip_cov"] = "clip_cov"
    masks: list[MaskConfig] = [ClipCovMask()]


class KLCovLoss(LossSection):
    """-rho A, plus a penalty |log rho| on the step's tokens whose log-prob and advantage covary most (KL-Cov)."""

    follows_advantage = False

    selection = "rollmill.algorithms.entropy:largest_covariance"
    implementation = "rollmill.algorithms.entropy:kl_cov"
    name: Literal["kl_cov"] = "kl_cov"
    share: float = Field(2e-4, gt=0, le=1)
    """Fraction of the step's tokens with the penalty; at least one."""
    coefficient: float = Field(1.0, ge=0)
    """Weight of the penalty."""


class KLCov(PolicyGradientOptions):
    """KL-Cov: a penalty on the tokens with the largest covariance of log-prob and advantage."""

    source = "arXiv:2505.22617"
    formula = """
    KL-Cov: the unclipped surrogate, with a penalty on the tokens whose log-prob and advantage covary most.

    cov_t = (log pi - mean) (A - mean), means over the tokens of the optimizer step
    L = 1/sum_i T_i sum_i sum_t [-rho A_i + abs(log rho) on the .0002 of the tokens with the largest cov_t]

    Needs several updates per batch, or stale rollouts: in a first update rho is 1, and the penalty is 0. Needs one more
    forward pass per optimizer step, as `clip_cov`.
    """

    name: Literal["kl_cov"] = "kl_cov"
    loss: LossConfig = KLCovLoss()


class ClipBMask(MaskSection):
    """Excludes tokens with A < 0 whose update would lower the entropy far more than the step's mean (Clip_B)."""

    implementation = "rollmill.algorithms.entropy:clip_b"
    name: Literal["clip_b"] = "clip_b"
    mu: float = Field(2.5, ge=0)
    """Accepted distance below the step's mean of p (H + log p), in standard deviations."""


class ClipB(PolicyGradientOptions):
    """Clip_B: masks penalised tokens whose update would lower the entropy most."""

    source = "arXiv:2602.03392"
    formula = """
    Clip_B: GRPO without the tokens whose update would lower the entropy most, compared with the batch.

    S_t = p_t (H_t + log p_t): raising the token's logit by e changes the entropy by -e S_t (theorem 3.2)
    L = 1/sum_i T_i sum_i sum_t -m_t min(rho A_i, clip(rho) A_i)
    m_t = 0 where A_i < 0 and S_t < mean - 2.5 std of the step

    One-sided, with the defaults of Trinity-RFT; there masked tokens leave the denominator, too, here they stay in it.
    Needs one more forward pass per optimizer step.
    """

    name: Literal["clip_b"] = "clip_b"
    masks: list[MaskConfig] = [ClipBMask()]


class ClipVMask(MaskSection):
    """Like `clip_b`, but compares each token with the vocabulary at its own position (Clip_V)."""

    uses_expected_discriminant = True

    implementation = "rollmill.algorithms.entropy:clip_v"
    name: Literal["clip_v"] = "clip_v"
    mu: float = Field(8.5, ge=0)
    """Accepted size of the difference, in standard deviations."""
    max_share: float = Field(1e-4, ge=0, le=1)
    """Maximum fraction of the step's tokens to exclude, but always at least one."""


class ClipV(PolicyGradientOptions):
    """Clip_V: as Clip_B, relative to the mean over the vocabulary."""

    source = "arXiv:2602.03392"
    formula = """
    Clip_V: as Clip_B, but each token is compared with the mean over the vocabulary at its position.

    D_t = sum_v p_v S_v - S_t, S_v = p_v (H_t + log p_v)
    L = 1/sum_i T_i sum_i sum_t -m_t min(rho A_i, clip(rho) A_i); m_t = 0 where A_i < 0 and D_t > 8.5 std of the step

    At most .0001 of the tokens (but always up to one) are masked, those with the greatest D_t. One-sided, with the
    defaults of Trinity-RFT; the denominator and the forward pass as in `clip_b`.
    """

    name: Literal["clip_v"] = "clip_v"
    masks: list[MaskConfig] = [ClipVMask()]


class HighEntropyMask(MaskSection):
    """Keeps the tokens with the highest entropy (80/20 rule)."""

    implementation = "rollmill.algorithms.entropy:high_entropy"
    name: Literal["high_entropy"] = "high_entropy"
    top: float = Field(0.2, gt=0, le=1)
    """Fraction of the step's tokens to keep."""


class HighEntropy(PolicyGradientOptions):
    """The 80/20 rule: DAPO's loss on the tokens with the highest entropy only."""

    source = "arXiv:2506.01939"
    formula = """
    The 80/20 rule: DAPO's loss on the 20 % of tokens with the highest entropy, where the text may branch.

    L = 1/sum_i T_i sum_i sum_t -1[H_t >= q] min(rho A_i, clip(rho, .8, 1.28) A_i)
    q = the .8 quantile of the optimizer step's entropies

    All tokens count in the denominator. Needs one more forward pass per optimizer step: the quantile is over the whole
    step.
    """

    name: Literal["high_entropy"] = "high_entropy"
    loss: LossConfig = PPOClipLoss(clip_high=0.28)
    drop_uniform_groups: bool = True
    masks: list[MaskConfig] = [HighEntropyMask()]


class SkyworkOR1(PolicyGradientOptions):
    """Skywork-OR1: token mean and adaptive entropy control."""

    source = "arXiv:2505.22312"
    formula = """
    Skywork-OR1: GRPO with a token mean and an entropy bonus that is active only while the entropy is low.

    L = 1/sum_i T_i sum_i sum_t [-min(rho A_i, clip(rho) A_i) - alpha H], A_i as in GRPO
    alpha = c if the entropy is at most .2 nats, else 0
    c begins at 0, and each step becomes c + .005, or c - .005 above .2

    The entropy is that of the previous step. Intended for on-policy updates without KL.
    """

    name: Literal["skywork_or1"] = "skywork_or1"
    entropy_control: EntropyControl | None = EntropyControl()
