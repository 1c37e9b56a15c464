"""`algorithm.advantage`: computation of advantages from rewards. Each name is a function of
`rollmill.algorithms.advantages`."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, model_validator

from rollmill.config.section import NamedSection, module_sections, section_union


class AdvantageSection(NamedSection):
    """Base of advantage estimators. The class attributes declare what an estimator needs."""

    compares_groups: ClassVar[bool] = True  #: needs at least two completions per group
    uses_critic: ClassVar[bool] = False
    uses_greedy: ClassVar[bool] = False  #: needs one greedy completion per task
    uses_parts: ClassVar[bool] = False  #: uses the parts of a reward instead of their sum
    uses_probabilities: ClassVar[bool] = False  #: needs the policy's distributions at the start of the step
    uses_episodes: ClassVar[bool] = False  #: handles rollouts with several experiences


class GroupNormalised(AdvantageSection):
    """(r - mean) / (std + eps) within the group (GRPO)."""

    implementation = "rollmill.algorithms.advantages:grpo"
    name: Literal["grpo"] = "grpo"
    scale: Literal["group", "batch", "none"] = "group"
    """Standard deviation to divide by: that of the group, that of all rewards of the batch, or none."""
    ddof: Literal[0, 1] = 1
    """0: population, 1: sample standard deviation."""


class MeanBaseline(AdvantageSection):
    """r - mean within the group (Dr. GRPO)."""

    implementation = "rollmill.algorithms.advantages:mean_baseline"
    name: Literal["mean_baseline"] = "mean_baseline"


class LeaveOneOut(AdvantageSection):
    """r minus the mean of the other rewards of the group (RLOO)."""

    implementation = "rollmill.algorithms.advantages:rloo"
    name: Literal["rloo"] = "rloo"


class BatchBaseline(AdvantageSection):
    """r minus the mean of the whole batch, or r itself (REINFORCE)."""

    compares_groups: ClassVar[bool] = False

    implementation = "rollmill.algorithms.advantages:reinforce"
    name: Literal["reinforce"] = "reinforce"
    baseline: Literal["batch", "none"] = "batch"
    """Baseline subtracted from the reward: the mean of the whole batch, or none."""


class BatchNormalised(AdvantageSection):
    """(A - mean) / (std + eps) over the batch, where A is the reward or r - mean within the group (REINFORCE++)."""

    compares_groups: ClassVar[bool] = False

    name: Literal["reinforce_plus_plus"] = "reinforce_plus_plus"
    baseline: Literal["none", "group"] = "none"
    """Baseline subtracted from the reward before normalising over the batch: none, or the group's mean."""
    ddof: Literal[0, 1] = 1
    """0: population, 1: sample standard deviation."""


class OptimalBaseline(AdvantageSection):
    """r minus the mean of the group weighted by length (OPO)."""

    implementation = "rollmill.algorithms.advantages:opo"
    name: Literal["opo"] = "opo"


class OptimalTokenBaseline(AdvantageSection):
    """Per token: reward to go minus a group mean weighted by the accumulated squared gradient norm (OTB)."""

    uses_probabilities: ClassVar[bool] = True

    name: Literal["optimal_token_baseline"] = "optimal_token_baseline"
    zero_tail: bool = False
    """Use a zero baseline at positions that only one completion of the group reaches. Otherwise its advantage there is
    0."""


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


class BestOfGroup(AdvantageSection):
    """1 for accepted completions and 0 for the others (RAFT)."""

    compares_groups: ClassVar[bool] = False

    implementation = "rollmill.algorithms.advantages:best_of_group"
    name: Literal["best_of_group"] = "best_of_group"
    accept: Literal["best", "all"] = "best"
    """`best`: the best of each group, the first one of ties. `all`: every completion above `threshold`."""
    threshold: float | None = None
    """Completions with a reward up to this are never accepted. Default: no threshold."""

    @model_validator(mode="after")
    def _rejects_something(self) -> BestOfGroup:
        if self.accept == "all" and self.threshold is None:
            raise ValueError("accept `all` rejects nothing without a `threshold`; give one: 0 accepts positive rewards")
        return self


class GreedyBaseline(AdvantageSection):
    """r minus the reward of a greedy completion of the same prompt (ReMax)."""

    compares_groups: ClassVar[bool] = False
    uses_greedy: ClassVar[bool] = True

    implementation = "rollmill.algorithms.advantages:remax"
    name: Literal["remax"] = "remax"


class MirrorBaseline(AdvantageSection):
    """r minus the group's mean, or minus tau log(mean(exp(r / tau))) (OPMD, Kimi k1.5)."""

    implementation = "rollmill.algorithms.advantages:opmd"
    name: Literal["opmd"] = "opmd"
    baseline: Literal["mean", "logavgexp"] = "mean"
    """The group's mean, or its estimate of tau log Z."""
    tau: float = Field(1.0, gt=0)
    """Temperature of `logavgexp`; a small value moves the baseline towards the best reward."""


class ShiftedBaseline(AdvantageSection):
    """r - (mean - beta) within the group: successes weigh more than failures (AsymRE)."""

    implementation = "rollmill.algorithms.advantages:asymre"
    name: Literal["asymre"] = "asymre"
    beta: float = 0.1
    """Offset of the baseline below the group's mean."""
    keep_uniform: bool = False
    """Give groups with equal rewards the advantage beta, as in the formula, instead of 0."""


class RewardPartsNormalised(AdvantageSection):
    """Normalises each part of the reward within the group, sums them, and normalises the sum over the batch (GDPO)."""

    uses_parts: ClassVar[bool] = True

    name: Literal["gdpo"] = "gdpo"
    ddof: Literal[0, 1] = 1
    """0: population, 1: sample standard deviation."""
    whitened: bool = True
    """Normalise the sum over the batch."""


class StepwiseAdvantage(AdvantageSection):
    """GRPO's advantage of an episode, assigned to each of its steps; an episode counts once in the baseline."""

    uses_episodes: ClassVar[bool] = True

    implementation = "rollmill.algorithms.token_advantages:stepwise"
    name: Literal["stepwise"] = "stepwise"
    per_step: bool = False
    """Divide by the episode's number of steps."""


class GroupInGroupAdvantage(AdvantageSection):
    """Advantage of the episode plus `weight` times that of the step among steps from the same state (GiGPO)."""

    uses_episodes: ClassVar[bool] = True

    implementation = "rollmill.algorithms.token_advantages:gigpo"
    name: Literal["gigpo"] = "gigpo"
    weight: float = Field(1.0, ge=0)
    """Weight of the step-level advantage."""
    gamma: float = Field(0.95, ge=0, le=1)
    """Discount of the rewards after a step."""
    scale: Literal["group", "none"] = "group"
    """Whether to divide by the standard deviation of the group."""
    ddof: Literal[0, 1] = 1
    """0: population, 1: sample standard deviation."""


class GAE(AdvantageSection):
    """Generalized advantage estimation per token, with a critic (PPO)."""

    compares_groups: ClassVar[bool] = False
    uses_critic: ClassVar[bool] = True

    name: Literal["gae"] = "gae"
    gamma: float = Field(1.0, ge=0, le=1)
    """Discount per token."""
    lam: float = Field(1.0, ge=0, le=1)
    """Lambda of the policy's advantages."""
    critic_lam: float = Field(1.0, ge=0, le=1)
    """Lambda of the critic's targets."""
    length_alpha: float | None = Field(None, gt=0)
    """Use the length-adaptive lambda 1 - 1 / (alpha l) instead of `lam` (VAPO)."""
    whiten: bool = True
    """Normalise the advantages over the batch's tokens."""


if TYPE_CHECKING:
    AdvantageConfig = AdvantageSection
else:
    AdvantageConfig = section_union(module_sections(__name__, AdvantageSection), kind="advantage")
