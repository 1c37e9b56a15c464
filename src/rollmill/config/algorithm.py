"""`algorithm`: the learning rule by name, and the parameters that rule honours."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from rollmill.config.base import Section

Aggregation = Literal["token-mean", "sequence-mean", "sequence-sum-mean", "constant"]


class AlgorithmOptions(Section):
    """Base of every algorithm's options. The class attributes say which parts of a run the algorithm uses."""

    uses_rollouts: ClassVar[bool] = True
    uses_experts: ClassVar[bool] = False


class PolicyGradientOptions(AlgorithmOptions):
    """What all policy-gradient algorithms share."""

    clip_low: float = Field(0.2, ge=0)
    """Ratios below 1 - clip_low bring no further gain."""
    clip_high: float = Field(0.2, ge=0)
    """Ratios above 1 + clip_high bring no further gain."""
    dual_clip: float | None = Field(None, gt=1)
    """Upper bound c on the loss of tokens with negative advantage: max(.., c A)."""
    aggregation: Aggregation = "token-mean"
    """How per-token terms become one number; each has one denominator for the whole optimizer step."""
    kl: float = Field(0.0, ge=0)
    """Weight of the k3 KL penalty to the initial policy, as a loss term. 0 keeps no reference model."""
    entropy: float = Field(0.0, ge=0)
    """Weight of the entropy bonus."""
    importance_cap: float | None = Field(None, gt=0)
    """Token-level truncated importance sampling: weight min(pi_old / pi_rollout, cap). Default off."""


class GRPOOptions(PolicyGradientOptions):
    """Group-relative policy optimisation (arXiv:2402.03300): (r - mean) / (std + eps) within a group."""

    name: Literal["grpo"] = "grpo"
    scale: Literal["group", "batch", "none"] = "group"
    """Standard deviation that divides the advantage."""
    ddof: Literal[0, 1] = 1
    """0: population, 1: sample standard deviation."""
    aggregation: Aggregation = "sequence-mean"


class DrGRPOOptions(PolicyGradientOptions):
    """Dr. GRPO (arXiv:2503.20783): r - mean, no length normalisation, constant denominator."""

    name: Literal["dr_grpo"]
    aggregation: Aggregation = "constant"


class DAPOOptions(PolicyGradientOptions):
    """DAPO (arXiv:2503.14476): asymmetric clipping, token mean, groups with differing rewards, overlong penalty."""

    name: Literal["dapo"]
    clip_high: float = Field(0.28, ge=0)
    """Ratios above 1 + clip_high bring no further gain."""
    ddof: Literal[0, 1] = 1
    """0: population, 1: sample standard deviation."""
    overlong_buffer: int = Field(0, ge=0)
    """L_c: completions longer than max_new_tokens - L_c lose up to 1 reward, linearly. 0 turns it off."""
    drop_uniform_groups: bool = True
    """Leave groups whose rewards are all equal out of the denominator."""


class ReinforceOptions(PolicyGradientOptions):
    """REINFORCE with the batch mean as baseline."""

    name: Literal["reinforce"]
    baseline: Literal["batch", "none"] = "batch"
    """What is taken off the reward: the mean of the whole batch, or nothing."""


class RLOOOptions(PolicyGradientOptions):
    """RLOO (arXiv:2402.14740): r_i minus the mean of the other rewards of its group."""

    name: Literal["rloo"]


class SFTOptions(AlgorithmOptions):
    """Supervised fine-tuning on the tasks' worked solutions."""

    uses_rollouts: ClassVar[bool] = False
    uses_experts: ClassVar[bool] = True

    name: Literal["sft"]
    batch: int = Field(32, ge=1)
    """Demonstrations per step."""
    aggregation: Aggregation = "token-mean"
    """How per-token terms become one number."""


class MIXOptions(GRPOOptions):
    """Trinity-RFT's MIX: (1 - mu) L_grpo(usual) + mu L_sft(expert), each with its own denominator."""

    uses_experts: ClassVar[bool] = True

    name: Literal["mix"]  # type: ignore[assignment]
    mu: float = Field(0.1, ge=0, le=1)
    """Weight of the SFT term."""
    expert_ratio: float = Field(0.25, gt=0, lt=1)
    """Expert share: ceil(expert_ratio x rollout.batch x rollout.group_size) demonstrations join each step."""


AlgorithmConfig = Annotated[
    GRPOOptions | DrGRPOOptions | DAPOOptions | ReinforceOptions | RLOOOptions | SFTOptions | MIXOptions,
    Field(discriminator="name"),
]
