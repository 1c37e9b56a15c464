"""Advantages that differ between the tokens of a completion, or the steps of an episode."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from rollmill.config.algorithms.base import AdvantageSection, Aggregation, PolicyGradientOptions

if TYPE_CHECKING:
    from rollmill.config.algorithms.base import AdvantageConfig


class GAE(AdvantageSection):
    """Generalized advantage estimation per token, with a critic (PPO)."""

    compares_groups = False
    uses_critic = True

    implementation = "rollmill.algorithms.token_advantages:value_targets"
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


class PPO(PolicyGradientOptions):
    """PPO: advantages from a critic (GAE), clipped surrogate, clipped value loss."""

    source = "arXiv:1707.06347"
    formula = """
    PPO with a critic and generalized advantage estimation.

    A_t = sum_k (gamma lam)^k delta_{t+k}, delta_t = r_t + gamma V_{t+1} - V_t, normalised over the batch's tokens
    L = 1/sum_i T_i sum_i sum_t -min(rho A_t, clip(rho) A_t)
    L_V = 1/sum_i T_i sum_i sum_t .5 max((V - R)^2, (clip(V, V_old +- value_clip) - R)^2)

    The reward is placed on a completion's last token. VC-PPO and VAPO: `critic.warmup_steps`, `advantage.length_alpha:
    0.05`.
    """

    name: Literal["ppo"] = "ppo"
    advantage: AdvantageConfig = GAE()


class OptimalTokenBaseline(AdvantageSection):
    """Per token: reward to go minus a group mean weighted by the accumulated squared gradient norm (OTB)."""

    uses_probabilities = True
    per_token = True

    implementation = "rollmill.algorithms.token_advantages:optimal_token_baseline"
    name: Literal["optimal_token_baseline"] = "optimal_token_baseline"
    zero_tail: bool = False
    """Use a zero baseline at positions that only one completion of the group reaches. Otherwise its advantage there is
    0."""


class OTB(PolicyGradientOptions):
    """OTB: r minus a baseline per token, weighted by the size of the gradient so far."""

    source = "arXiv:2602.07078"
    formula = """
    Optimal token baseline: a baseline per token, weighted by each completion's accumulated gradient so far.

    W_jt = sum over k <= t of 1 - 2 pi(y_jk) + sum_v pi(v)^2, by the policy at the start of the step
    A_it = r_i - sum_j W_jt r_j / sum_j W_jt, j over the completions of the group with a token t
    L = 1/sum_i T_i sum_i sum_t -min(rho A_it, clip(rho) A_it)

    The weights take one forward pass, which runs while rewards are computed. Formula and defaults are those of verl.
    """

    name: Literal["otb"] = "otb"
    advantage: AdvantageConfig = OptimalTokenBaseline()


class StepwiseAdvantage(AdvantageSection):
    """GRPO's advantage of an episode, assigned to each of its steps; an episode counts once in the baseline."""

    uses_episodes = True

    implementation = "rollmill.algorithms.token_advantages:stepwise"
    name: Literal["stepwise"] = "stepwise"
    per_step: bool = False
    """Divide by the episode's number of steps."""


class StepwiseGRPO(PolicyGradientOptions):
    """Step-wise GRPO: an episode's advantage on each of its steps."""

    source = "arXiv:2505.17826"
    formula = """
    Step-wise GRPO for episodes of several steps: one advantage per episode, used on each of its steps.

    A = (r - mean) / (std + eps) over the episodes of the group, each counted once
    L = 1/N sum_i 1/T_i sum_t -min(rho A_i, clip(rho) A_i), N steps
    """

    name: Literal["stepwise_grpo"] = "stepwise_grpo"
    advantage: AdvantageConfig = StepwiseAdvantage()
    aggregation: Aggregation = "sequence-mean"


class GroupInGroupAdvantage(AdvantageSection):
    """Advantage of the episode plus `weight` times that of the step among steps from the same state (GiGPO)."""

    uses_episodes = True

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


class GiGPO(PolicyGradientOptions):
    """GiGPO: the episode's advantage plus the step's relative to steps taken in the same state."""

    source = "arXiv:2505.10978"
    formula = """
    GiGPO: group-in-group advantages for agents that take several steps.

    A = A^E + weight A^S: the episode relative to its group, and the step relative to steps taken in the same state
    L = 1/N sum_i 1/T_i sum_t -min(rho A_i, clip(rho) A_i), N steps
    """

    name: Literal["gigpo"] = "gigpo"
    advantage: AdvantageConfig = GroupInGroupAdvantage()
    aggregation: Aggregation = "sequence-mean"
