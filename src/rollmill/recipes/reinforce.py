"""REINFORCE and its baselines: of the batch, the group, the other completions, a greedy one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from rollmill.config.algorithm import AdvantageSection, Aggregation, KLOptions, LossSection, PolicyGradientOptions
from rollmill.recipes.grpo import MeanBaseline

if TYPE_CHECKING:
    from rollmill.config.algorithm import AdvantageConfig, LossConfig


class BatchBaseline(AdvantageSection):
    """r minus the mean of the whole batch, or r itself (REINFORCE)."""

    compares_groups = False

    implementation = "rollmill.algorithms.advantages:reinforce"
    name: Literal["reinforce"] = "reinforce"
    baseline: Literal["batch", "none"] = "batch"
    """Baseline subtracted from the reward: the mean of the whole batch, or none."""


class Reinforce(PolicyGradientOptions):
    """REINFORCE with the batch mean as baseline."""

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
