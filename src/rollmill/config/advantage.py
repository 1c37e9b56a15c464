"""`algorithm.advantage`: how rewards become advantages. Each name is a function of `rollmill.algorithms.advantages`."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, SerializeAsAny, WrapValidator, model_validator

from rollmill.config.section import NamedSection, RegisteredUnion


class AdvantageSection(NamedSection):
    """What every advantage says about itself."""

    compares_groups: ClassVar[bool] = True  #: useless with one completion per group
    uses_critic: ClassVar[bool] = False
    uses_greedy: ClassVar[bool] = False  #: needs one greedy completion per task
    uses_parts: ClassVar[bool] = False  #: sees the parts of a reward instead of their sum
    uses_probabilities: ClassVar[bool] = False  #: needs the policy's distributions at the start of the step
    uses_episodes: ClassVar[bool] = False  #: knows that a rollout may give several experiences


class GroupNormalised(AdvantageSection):
    """(r - mean) / (std + eps) within the group (GRPO)."""

    name: Literal["grpo"] = "grpo"
    scale: Literal["group", "batch", "none"] = "group"
    """Standard deviation that divides: the group's, that of all rewards of the batch, or none."""
    ddof: Literal[0, 1] = 1
    """0: population, 1: sample standard deviation."""


class MeanBaseline(AdvantageSection):
    """r - mean within the group (Dr. GRPO)."""

    name: Literal["mean_baseline"] = "mean_baseline"


class LeaveOneOut(AdvantageSection):
    """r minus the mean of the other rewards of the group (RLOO)."""

    name: Literal["rloo"] = "rloo"


class BatchBaseline(AdvantageSection):
    """r minus the mean of the whole batch, or r itself (REINFORCE)."""

    compares_groups: ClassVar[bool] = False

    name: Literal["reinforce"] = "reinforce"
    baseline: Literal["batch", "none"] = "batch"
    """What is taken off the reward: the mean of the whole batch, or nothing."""


class BatchNormalised(AdvantageSection):
    """(A - mean) / (std + eps) over the batch, A the reward or r - mean within the group (REINFORCE++)."""

    compares_groups: ClassVar[bool] = False

    name: Literal["reinforce_plus_plus"] = "reinforce_plus_plus"
    baseline: Literal["none", "group"] = "none"
    """What is taken off the reward before the batch is normalised: nothing, or the group's mean."""
    ddof: Literal[0, 1] = 1
    """0: population, 1: sample standard deviation."""


class OptimalBaseline(AdvantageSection):
    """r minus the mean of the group weighted by length (OPO)."""

    name: Literal["opo"] = "opo"


class OptimalTokenBaseline(AdvantageSection):
    """Per token: what is still to come minus a mean of the group, weighted by the gradient's size so far (OTB)."""

    uses_probabilities: ClassVar[bool] = True

    name: Literal["optimal_token_baseline"] = "optimal_token_baseline"
    zero_tail: bool = False
    """No baseline where one completion of the group alone is that long. Otherwise its advantage there is 0."""


class PassAtKAdvantage(AdvantageSection):
    """What a completion adds to the best of k, over all subsets of k completions of the group (pass@k)."""

    name: Literal["pass_at_k"] = "pass_at_k"
    k: int = Field(4, ge=2)
    """Completions of a subset."""
    baseline: Literal["mean", "others"] = "mean"
    """What is taken off the best of the subsets with the completion: the mean over all subsets, or the best without
    it."""
    scale: Literal["subsets", "group", "none"] = "subsets"
    """Standard deviation that divides: that of the subsets' best rewards, of the group's rewards, or none."""


class BestOfGroup(AdvantageSection):
    """1 for accepted completions and 0 for the others (RAFT)."""

    compares_groups: ClassVar[bool] = False

    name: Literal["best_of_group"] = "best_of_group"
    accept: Literal["best", "all"] = "best"
    """`best`: the best of each group, the first where several are. `all`: every one above `threshold`."""
    threshold: float | None = None
    """Completions with a reward up to this are never accepted. Default: no bound."""

    @model_validator(mode="after")
    def _rejects_something(self) -> BestOfGroup:
        if self.accept == "all" and self.threshold is None:
            raise ValueError("accept `all` rejects nothing without a `threshold`; give one: 0 accepts positive rewards")
        return self


class GreedyBaseline(AdvantageSection):
    """r minus the reward of the greedy completion of the same prompt (ReMax)."""

    compares_groups: ClassVar[bool] = False
    uses_greedy: ClassVar[bool] = True

    name: Literal["remax"] = "remax"


class MirrorBaseline(AdvantageSection):
    """r minus the group's mean, or minus tau log(mean(exp(r / tau))) (OPMD, Kimi k1.5)."""

    name: Literal["opmd"] = "opmd"
    baseline: Literal["mean", "logavgexp"] = "mean"
    """The mean, or the estimate of tau log Z from the group."""
    tau: float = Field(1.0, gt=0)
    """Temperature of `logavgexp`; a small one moves the baseline towards the best reward."""


class ShiftedBaseline(AdvantageSection):
    """r - (mean - beta) within the group: successes weigh more than failures (AsymRE)."""

    name: Literal["asymre"] = "asymre"
    beta: float = 0.1
    """How far the baseline lies below the group's mean."""
    keep_uniform: bool = False
    """Groups with equal rewards get beta, as the formula says, instead of 0."""


class RewardPartsNormalised(AdvantageSection):
    """Every part of the reward normalised within the group on its own, summed, normalised over the batch (GDPO)."""

    uses_parts: ClassVar[bool] = True

    name: Literal["gdpo"] = "gdpo"
    ddof: Literal[0, 1] = 1
    """0: population, 1: sample standard deviation."""
    whitened: bool = True
    """Normalise the sum over the batch."""


class StepwiseAdvantage(AdvantageSection):
    """GRPO's advantage of an episode, given to each of its steps; an episode counts once in the baseline."""

    uses_episodes: ClassVar[bool] = True

    name: Literal["stepwise"] = "stepwise"
    per_step: bool = False
    """Divide by the number of the episode's steps."""


class GroupInGroupAdvantage(AdvantageSection):
    """Advantage of the episode plus `weight` times that of the step among steps taken in the same state (GiGPO)."""

    uses_episodes: ClassVar[bool] = True

    name: Literal["gigpo"] = "gigpo"
    weight: float = Field(1.0, ge=0)
    """Weight of the step's advantage."""
    gamma: float = Field(0.95, ge=0, le=1)
    """Discount of the rewards that follow a step."""
    scale: Literal["group", "none"] = "group"
    """Whether the standard deviation of those compared divides."""
    ddof: Literal[0, 1] = 1
    """0: population, 1: sample standard deviation."""


class GAE(AdvantageSection):
    """Generalized advantage estimation per token, from a critic (PPO)."""

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
    """Lambda 1 - 1 / (alpha l) by length instead of `lam` (VAPO)."""
    whiten: bool = True
    """Normalise the advantages over the batch's tokens."""


AdvantageConfig = Annotated[
    SerializeAsAny[
        Annotated[
            GroupNormalised
            | MeanBaseline
            | LeaveOneOut
            | BatchBaseline
            | BatchNormalised
            | OptimalBaseline
            | OptimalTokenBaseline
            | PassAtKAdvantage
            | BestOfGroup
            | GreedyBaseline
            | MirrorBaseline
            | ShiftedBaseline
            | RewardPartsNormalised
            | StepwiseAdvantage
            | GroupInGroupAdvantage
            | GAE,
            Field(discriminator="name"),
        ]
    ],
    WrapValidator(RegisteredUnion("advantage")),
]
