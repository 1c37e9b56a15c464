"""`algorithm`: what every learning rule consists of. The rules themselves are in `rollmill.recipes`, one file each."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from rollmill.config.advantage import AdvantageConfig, AdvantageSection, GroupNormalised
from rollmill.config.loss import CorrectionConfig, LossConfig, LossSection, MaskConfig, PPOClipLoss
from rollmill.config.section import Section, merge_with_default

Aggregation = Literal["token-mean", "sequence-mean", "sequence-sum-mean", "constant"]


class AlgorithmOptions(Section):
    """Base of every algorithm's options. The class attributes say which parts of a run the algorithm uses."""

    uses_rollouts: ClassVar[bool] = True
    uses_experts: ClassVar[bool] = False
    uses_pairs: ClassVar[bool] = False
    uses_labels: ClassVar[bool] = False  #: completions that are desirable or undesirable, each on its own
    needs_rewards: ClassVar[bool] = True  #: of an algorithm that rolls out
    trains_policy: ClassVar[bool] = True  #: else a model of its own, which the checkpoints hold beside the policy
    source: ClassVar[str] = ""  #: paper, or whose implementation

    name: str

    @property
    def uses_examples(self) -> bool:
        """Whether it learns from worked solutions, preference pairs or labelled completions."""
        return self.uses_experts or self.uses_pairs or self.uses_labels

    @property
    def examples(self) -> str:
        """Name of what it learns from besides rollouts, for messages."""
        if self.uses_pairs:
            return "preference pairs"
        return "labelled completions" if self.uses_labels else "worked solutions"

    def demonstrations_per_step(self, rollouts: int) -> int:
        """Demonstrations, pairs or labelled completions that join a step of so many rollouts."""
        return 0


class OfflineAlgorithmOptions(AlgorithmOptions):
    """Base of algorithms that learn from a file and roll nothing out."""

    uses_rollouts: ClassVar[bool] = False

    batch: int = Field(32, ge=1)
    """Demonstrations, pairs or labelled completions per step."""

    def demonstrations_per_step(self, rollouts: int) -> int:
        """See AlgorithmOptions."""
        return self.batch


class KLOptions(Section):
    """A KL penalty to the initial policy. A number alone is its `coefficient`."""

    coefficient: float = Field(0.0, ge=0)
    """Weight of the penalty. 0 keeps no reference model."""
    estimator: Literal["k1", "k2", "k3", "abs", "unbiased"] = "k3"
    """How KL(policy || reference) is estimated per token. `unbiased` is k3 times the ratio to the rollout
    policy, right off policy, too."""
    where: Literal["loss", "reward"] = "loss"
    """A term of the loss, or taken off the reward before advantages are formed."""
    target: float | None = Field(None, gt=0)
    """KL in nats per token that the coefficient is steered towards. Default: the coefficient stays."""
    horizon: int = Field(10_000, ge=1)
    """Completions in which the coefficient follows the target. Only with `target`."""
    refresh_every: int | None = Field(None, ge=1)
    """Steps after which the policy of the moment becomes the reference. Default: the initial policy stays it."""


class EntropyControl(Section):
    """Steers the weight of the entropy bonus (Skywork-OR1). The bonus counts only while the entropy is low."""

    target: float = Field(0.2, gt=0)
    """Mean entropy per token, in nats, of the step before, up to which the bonus counts and its weight rises; above it
    the weight falls."""
    delta: float = Field(0.005, gt=0)
    """By how much the weight rises or falls each step."""
    maximum: float = Field(1.0, gt=0)
    """The weight stays within 0 and this. The first weight is `entropy`."""


class CriticOptions(Section):
    """The value model: a network with one output, and an optimizer of its own. Only for advantage `gae`."""

    network: Literal["own", "policy"] = "own"
    """`own`: a copy of the policy's network, made when the stage starts. `policy`: a head on the policy's own hidden
    states, which costs no memory; only the head learns from the value loss, and it wants a greater lr."""
    lr: float = Field(1e-5, gt=0)
    """Its learning rate at its highest; schedule and warm-up are the trainer's."""
    value_clip: float | None = Field(0.2, gt=0)
    """How far a value may move from its old one before moving on brings no gain; null: no bound."""
    warmup_steps: int = Field(0, ge=0)
    """Steps at the start in which only the critic learns (value pretraining)."""


class PolicyGradientOptions(AlgorithmOptions):
    """What all policy-gradient algorithms consist of."""

    advantage: AdvantageConfig = GroupNormalised()
    """How rewards become advantages: a name, or a section."""
    loss: LossConfig = PPOClipLoss()
    """The per-token loss: a name, or a section."""
    kl: KLOptions = KLOptions()
    """The KL penalty: its coefficient, or a section."""
    entropy: float = Field(0.0, ge=0)
    """Weight of the entropy bonus."""
    entropy_control: EntropyControl | None = None
    """Makes the weight of the entropy bonus follow a target. Default: it stays."""
    aggregation: Aggregation = "token-mean"
    """How per-token terms become one number; each has one denominator for the whole optimizer step."""
    corrections: list[CorrectionConfig] = []
    """Weights for tokens that another policy than the old one sampled; several are multiplied."""
    masks: list[MaskConfig] = []
    """Tokens that the policy loss leaves out, chosen over the whole optimizer step by one more forward pass."""
    proximal: Literal["auto", "rollout", "recompute", "interpolate"] = "auto"
    """Log-probs of the old policy: recorded by the rollout, recomputed before the first update, or interpolated between
    rollout and policy. `auto` recomputes where there are corrections."""
    overlong_buffer: int = Field(0, ge=0)
    """L_c: completions longer than max_new_tokens - L_c lose up to 1 reward, linearly. 0 turns it off."""
    drop_uniform_groups: bool = False
    """Leave groups whose rewards are all equal out of the denominator."""
    reset_optimizer: bool = False
    """Forget the optimizer's moments at the start of every training step."""
    critic: CriticOptions = CriticOptions()
    """The value model. Only for advantage `gae`."""

    @model_validator(mode="before")
    @classmethod
    def _over_the_algorithms_own(cls, data: Any) -> Any:
        """A part that names no other component keeps the values of this algorithm that it does not set."""
        if not isinstance(data, dict):
            return data
        data = dict(data)
        if isinstance(data.get("kl"), int | float) and not isinstance(data["kl"], bool):
            data["kl"] = {"coefficient": data["kl"]}
        for key in ("advantage", "loss", "kl", "critic", "entropy_control"):
            if key in data:
                data[key] = merge_with_default(cls.model_fields[key].default, data[key])
        return data

    @field_validator("corrections", "masks", mode="before")
    @classmethod
    def _names_alone(cls, value: Any) -> Any:
        return (
            [{"name": each} if isinstance(each, str) else each for each in value] if isinstance(value, list) else value
        )


__all__ = [
    "AdvantageConfig",
    "AdvantageSection",
    "Aggregation",
    "AlgorithmOptions",
    "CriticOptions",
    "EntropyControl",
    "KLOptions",
    "LossConfig",
    "LossSection",
    "OfflineAlgorithmOptions",
    "PolicyGradientOptions",
]
