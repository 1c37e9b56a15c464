"""Baselines without a critic, of the group or the batch: GRPO, REINFORCE and their variants."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from rollmill.config.algorithms.base import (
    AdvantageSection,
    Aggregation,
    GroupNormalised,
    KLOptions,
    LossSection,
    PolicyGradientOptions,
    PPOClipLoss,
)

if TYPE_CHECKING:
    from rollmill.config.algorithms.base import AdvantageConfig, LossConfig


class GRPO(PolicyGradientOptions):
    """Group-relative policy optimisation: rewards normalised within the group, mean over completions of token means."""

    source = "arXiv:2402.03300"
    formula = """
    GRPO: clipped surrogate on group-normalised rewards.

    A_i = (r_i - mean) / (std + eps) within the group
    L = 1/N sum_i 1/T_i sum_t [-min(rho A_i, clip(rho) A_i) + kl k3], N completions with a reward of the optimizer step
    """

    name: Literal["grpo"] = "grpo"
    aggregation: Aggregation = "sequence-mean"


class MeanBaseline(AdvantageSection):
    """r - mean within the group (Dr. GRPO)."""

    implementation = "rollmill.algorithms.advantages:mean_baseline"
    name: Literal["mean_baseline"] = "mean_baseline"


class DrGRPO(PolicyGradientOptions):
    """Dr. GRPO: r - mean, no length normalisation, constant denominator."""

    source = "arXiv:2503.20783"
    formula = """
    Dr. GRPO: GRPO without the two biases of its normalisations.

    A_i = r_i - mean within the group
    L = 1/(N max_new_tokens) sum_i sum_t -min(rho A_i, clip(rho) A_i): a constant, whatever the lengths or the padding
    """

    name: Literal["dr_grpo"] = "dr_grpo"
    advantage: AdvantageConfig = MeanBaseline()
    aggregation: Aggregation = "constant"


class DAPO(PolicyGradientOptions):
    """DAPO: asymmetric clipping, token mean, uniform groups left out, optional overlong penalty."""

    source = "arXiv:2503.14476"
    formula = """
    DAPO: GRPO's advantage, clip bounds .2 and .28, token mean, overlong penalty, uniform groups left out.

    L = 1/sum_i T_i sum_i sum_t -min(rho A_i, clip(rho, .8, 1.28) A_i)

    The penalty applies if `overlong_buffer` is given (published: a fifth of max_new_tokens). It is subtracted from the
    reward before advantages are computed. Groups whose rewards are all equal are left out of the denominator. For
    dynamic sampling, which replaces them by new rollouts, add the operator `group_variance` to `pipeline`.
    """

    name: Literal["dapo"] = "dapo"
    loss: LossConfig = PPOClipLoss(clip_high=0.28)
    drop_uniform_groups: bool = True


class LitePPO(PolicyGradientOptions):
    """Lite PPO: mean of the group, standard deviation of the batch, token mean."""

    source = "arXiv:2508.08221"
    formula = """
    Lite PPO: the group's mean and the batch's standard deviation, token mean, no critic.

    A_i = (r_i - mean within the group) / (std of all rewards of the batch + eps)
    L = 1/sum_i T_i sum_i sum_t -min(rho A_i, clip(rho) A_i)
    """

    name: Literal["lite_ppo"] = "lite_ppo"
    advantage: AdvantageConfig = GroupNormalised(scale="batch")


class PassAtKAdvantage(AdvantageSection):
    """Contribution of a completion to the best of k, over all subsets of k completions of the group (pass@k)."""

    implementation = "rollmill.algorithms.advantages:pass_at_k"
    name: Literal["pass_at_k"] = "pass_at_k"
    k: int = Field(4, ge=2)
    """Completions per subset."""
    baseline: Literal["mean", "others"] = "mean"
    """Baseline of the best reward of the subsets with the completion: the mean over all subsets, or the best of each
    subset's other members."""
    scale: Literal["subsets", "group", "none"] = "subsets"
    """Standard deviation to divide by: that of the subsets' best rewards, that of the group's rewards, or none."""


class PassAtKTraining(PolicyGradientOptions):
    """Pass@k training: advantages of the best of k completions."""

    source = "arXiv:2508.10751"
    formula = """
    Pass@k training: GRPO for the best of k completions, in closed form over all subsets of k of the group.

    R_S = best reward of the subset S
    A_i = (mean of R_S over the S with i - mean of R_S) / (std of R_S + eps)
    L = 1/sum_i T_i sum_i sum_t -min(rho A_i, clip(rho) A_i)

    With rewards of 0 and 1 these are the advantages that the paper derives in closed form. `advantage: {baseline:
    others, scale: none}` with `aggregation: sequence-sum-mean` is 1 / k times an unbiased estimate of the gradient of
    pass@k (PKPO, arXiv:2505.15201). k of the whole group with `{baseline: others, scale: group}` is verl's `grpo_passk`
    (arXiv:2503.19595).
    """

    name: Literal["pass_at_k"] = "pass_at_k"
    advantage: AdvantageConfig = PassAtKAdvantage()


class RewardPartsNormalised(AdvantageSection):
    """Normalises each part of the reward within the group, sums them, and normalises the sum over the batch (GDPO)."""

    uses_parts = True

    implementation = "rollmill.algorithms.advantages:gdpo"
    name: Literal["gdpo"] = "gdpo"
    ddof: Literal[0, 1] = 1
    """0: population, 1: sample standard deviation."""
    whitened: bool = True
    """Normalise the sum over the batch."""


class GDPO(PolicyGradientOptions):
    """GDPO: reward components normalised separately within the group."""

    source = "arXiv:2601.05242"
    formula = """
    GDPO: several rewards, each normalised separately, so that none is drowned out by another's variance.

    A = whiten(sum_k w_k grpo(r_k)) over the batch, w_k the weights of `rewards`
    L = 1/N sum_i 1/T_i sum_t -min(rho A_i, clip(rho) A_i)
    """

    name: Literal["gdpo"] = "gdpo"
    advantage: AdvantageConfig = RewardPartsNormalised()
    aggregation: Aggregation = "sequence-mean"


class BatchBaseline(AdvantageSection):
    """r minus the mean of the whole batch, or r itself (REINFORCE)."""

    compares_groups = False

    implementation = "rollmill.algorithms.advantages:reinforce"
    name: Literal["reinforce"] = "reinforce"
    baseline: Literal["batch", "none"] = "batch"
    """Baseline subtracted from the reward: the mean of the whole batch, or none."""


class Reinforce(PolicyGradientOptions):
    """REINFORCE with the batch mean as baseline; the ratio is clipped as in PPO."""

    source = "Williams 1992"
    formula = """
    REINFORCE with the batch's mean reward as baseline, or none; the ratio is clipped as in PPO.

    A_i = r_i - mean over the batch
    L = 1/sum_i T_i sum_i sum_t -min(rho A_i, clip(rho) A_i)
    """

    name: Literal["reinforce"] = "reinforce"
    advantage: AdvantageConfig = BatchBaseline()


class BatchNormalised(AdvantageSection):
    """(A - mean) / (std + eps) over the batch, where A is the reward or r - mean within the group (REINFORCE++)."""

    compares_groups = False
    per_token = True

    implementation = "rollmill.algorithms.token_advantages:reinforce_plus_plus"
    name: Literal["reinforce_plus_plus"] = "reinforce_plus_plus"
    baseline: Literal["none", "group"] = "none"
    """Baseline subtracted from the reward before normalising over the batch: none, or the group's mean."""
    ddof: Literal[0, 1] = 1
    """0: population, 1: sample standard deviation."""


class ReinforcePlusPlus(PolicyGradientOptions):
    """REINFORCE++: the KL penalty inside the reward, advantages normalised over the batch."""

    source = "arXiv:2501.03262"
    formula = """
    REINFORCE++: rewards minus a KL penalty, normalised over the whole batch.

    A_t = (G_t - mean) / (std + eps) over the batch's tokens, G_t = r_i - kl sum_{k >= t} k1_k
    L = 1/sum_i T_i sum_i sum_t -min(rho A_i, clip(rho) A_i)
    """

    name: Literal["reinforce_plus_plus"] = "reinforce_plus_plus"
    advantage: AdvantageConfig = BatchNormalised()
    kl: KLOptions = KLOptions(coefficient=0.01, estimator="k1", where="reward")


class ReinforcePlusPlusBaseline(PolicyGradientOptions):
    """REINFORCE++-baseline: r - mean within the group, normalised over the batch."""

    source = "arXiv:2501.03262"
    formula = """
    REINFORCE++-baseline: the group's mean as baseline, normalised over the whole batch, k2 penalty in the loss.

    A_i = (a_i - mean) / (std + eps) over the batch's tokens, a_i = r_i - mean within the group
    L = 1/sum_i T_i sum_i sum_t [-min(rho A_i, clip(rho) A_i) + kl k2]
    """

    name: Literal["reinforce_plus_plus_baseline"] = "reinforce_plus_plus_baseline"
    advantage: AdvantageConfig = BatchNormalised(baseline="group")
    kl: KLOptions = KLOptions(coefficient=0.01, estimator="k2")


class LeaveOneOut(AdvantageSection):
    """r minus the mean of the other rewards of the group (RLOO)."""

    implementation = "rollmill.algorithms.advantages:rloo"
    name: Literal["rloo"] = "rloo"


class RLOO(PolicyGradientOptions):
    """RLOO: r_i minus the mean of the other rewards of its group, summed over tokens."""

    source = "arXiv:2402.14740"
    formula = """
    RLOO: REINFORCE with the mean of the other completions as baseline; unbiased on policy.

    A_i = r_i - mean of r_j, j != i, within the group
    L = 1/N sum_i sum_t -min(rho A_i, clip(rho) A_i)

    Tokens are summed: a mean over tokens would divide by random lengths, which biases the estimate.
    """

    name: Literal["rloo"] = "rloo"
    advantage: AdvantageConfig = LeaveOneOut()
    aggregation: Aggregation = "sequence-sum-mean"


class PolicyGradientLoss(LossSection):
    """-A log pi, without a ratio (REINFORCE, GPG, AsymRE)."""

    uses_old = False

    implementation = "rollmill.algorithms.losses:policy_gradient"
    name: Literal["policy_gradient"] = "policy_gradient"


class GreedyBaseline(AdvantageSection):
    """r minus the reward of a greedy completion of the same prompt (ReMax)."""

    compares_groups = False
    uses_greedy = True

    implementation = "rollmill.algorithms.advantages:remax"
    name: Literal["remax"] = "remax"


class ReMax(PolicyGradientOptions):
    """ReMax: r minus the reward of the greedy completion of the same prompt."""

    source = "arXiv:2310.10505"
    formula = """
    ReMax: REINFORCE with the reward of the greedy completion as baseline.

    A_i = r_i - r(greedy completion of the same prompt)
    L = 1/N sum_i sum_t -A_i log pi

    Rolls out one greedy completion per task besides the group.
    """

    name: Literal["remax"] = "remax"
    advantage: AdvantageConfig = GreedyBaseline()
    loss: LossConfig = PolicyGradientLoss()
    aggregation: Aggregation = "sequence-sum-mean"


class OptimalBaseline(AdvantageSection):
    """r minus the mean of the group weighted by length (OPO)."""

    implementation = "rollmill.algorithms.advantages:opo"
    name: Literal["opo"] = "opo"


class OPO(PolicyGradientOptions):
    """OPO: r minus the length-weighted mean of the group, -A log pi."""

    source = "arXiv:2505.23585"
    formula = """
    OPO: exact on-policy policy gradient with the minimum-variance baseline, a mean weighted by length.

    A_i = r_i - sum_j T_j r_j / sum_j T_j within the group
    L = 1/N sum_i sum_t -A_i log pi

    Intended for one update per batch, without KL and entropy bonus.
    """

    name: Literal["opo"] = "opo"
    advantage: AdvantageConfig = OptimalBaseline()
    loss: LossConfig = PolicyGradientLoss()
    aggregation: Aggregation = "sequence-sum-mean"


class GPG(PolicyGradientOptions):
    """GPG: -A log pi, no ratio, no reference, uniform groups left out."""

    source = "arXiv:2504.02546"
    formula = """
    GPG: the plain group policy gradient; groups with equal rewards do not count in the denominator.

    L = 1/sum_i T_i sum_i sum_t -A_i log pi, A_i = r_i - mean within the group, over groups with differing rewards
    """

    name: Literal["gpg"] = "gpg"
    advantage: AdvantageConfig = MeanBaseline()
    loss: LossConfig = PolicyGradientLoss()
    drop_uniform_groups: bool = True
