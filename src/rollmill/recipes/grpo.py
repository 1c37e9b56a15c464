"""GRPO and its variants: rewards compared within the group, the ratio clipped as in PPO."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from rollmill.config.algorithm import AdvantageSection, Aggregation, GroupNormalised, PolicyGradientOptions, PPOClipLoss

if TYPE_CHECKING:
    from rollmill.config.algorithm import AdvantageConfig, LossConfig


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
