"""`algorithm`: options shared by all learning algorithms, and the bases of their parts.

The algorithms are in `rollmill.config.algorithms`, each with the parts that it alone brings.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from rollmill.config.algorithms.corrections import CorrectionConfig, OffPolicyMask
from rollmill.config.section import NamedSection, Section, merge_with_default
from rollmill.types import ExperienceSource

if TYPE_CHECKING:
    from rollmill.config.algorithms.distillation import SelfDistill

Aggregation = Literal["token-mean", "sequence-mean", "sequence-sum-mean", "constant"]


class AlgorithmOptions(Section):
    """Base of every algorithm's options. The class attributes declare which parts of a run the algorithm uses."""

    uses_rollouts: ClassVar[bool] = True
    uses_demonstrations: ClassVar[bool] = False
    uses_pairs: ClassVar[bool] = False
    uses_labels: ClassVar[bool] = False  #: completions that are desirable or undesirable, each on its own
    needs_rewards: ClassVar[bool] = True  #: of algorithms with rollouts
    recipe: ClassVar[str] = ""
    """Import path of the function (options, RecipeSettings) -> Recipe; empty for an algorithm with a trainer of its
    own."""
    trains_policy: ClassVar[bool] = True  #: otherwise a separate model, stored in the checkpoints beside the policy
    source: ClassVar[str] = ""  #: paper or implementation
    formula: ClassVar[str] = ""  #: title, formulas and remarks; `rollmill algorithms NAME` prints them

    name: str

    @property
    def uses_examples(self) -> bool:
        """True if the algorithm learns from worked solutions, preference pairs or labelled completions."""
        return self.uses_demonstrations or self.uses_pairs or self.uses_labels

    @property
    def teacher_folder(self) -> Path | None:
        """Folder of a separate model that the algorithm learns from, if it has one."""
        return None

    @property
    def keeps_teacher(self) -> bool:
        """True if a teacher is kept beside the policy: a separate model, or other weights of the policy."""
        return self.teacher_folder is not None

    @property
    def self_teacher(self) -> SelfDistill | None:
        """The options of a policy that teaches itself, with context that it does not get."""
        return None

    @property
    def uses_reference(self) -> bool:
        """True if log-probs of a reference policy are needed."""
        return False

    def describe_imbalance(self, desirable: int, undesirable: int) -> str:
        """Returns what is wrong with so many completions of each kind; empty if nothing is, or there are no kinds."""
        return ""

    @property
    def active_critic(self) -> CriticOptions | None:
        """The options of the critic, if the algorithm trains one."""
        return None

    @property
    def sources(self) -> frozenset[ExperienceSource]:
        """Origins of the experiences that it learns from."""
        made = {ExperienceSource.ROLLOUT: self.uses_rollouts, ExperienceSource.EXPERT: self.uses_demonstrations}
        made[ExperienceSource.PREFERENCE] = self.uses_pairs or self.uses_labels
        return frozenset(source for source, used in made.items() if used)

    @property
    def examples(self) -> str:
        """Name of the offline data that the algorithm learns from, for messages."""
        if self.uses_pairs:
            return "preference pairs"
        return "labelled completions" if self.uses_labels else "worked solutions"

    def demonstrations_per_step(self, rollouts: int) -> int:
        """Returns the number of demonstrations, pairs or labelled completions that join a step of `rollouts`
        rollouts."""
        return 0


class OfflineAlgorithmOptions(AlgorithmOptions):
    """Base of algorithms that learn from a file, without rollouts."""

    uses_rollouts: ClassVar[bool] = False

    batch: int = Field(32, ge=1)
    """Demonstrations, pairs or labelled completions per step."""

    def demonstrations_per_step(self, rollouts: int) -> int:
        return self.batch


class KLOptions(Section):
    """KL penalty to a reference policy. A number alone is its `coefficient`."""

    coefficient: float = Field(0.0, ge=0)
    """Weight of the penalty. At 0 no reference model is loaded."""
    estimator: Literal["k1", "k2", "k3", "abs", "unbiased"] = "k3"
    """Estimator of KL(policy || reference) per token. `unbiased` is k3 times the ratio to the rollout policy, which is
    also correct off-policy."""
    where: Literal["loss", "reward"] = "loss"
    """A term of the loss, or subtracted from the reward before advantages are computed."""
    target: float | None = Field(None, gt=0)
    """Target KL in nats per token; the coefficient adapts to it. Default: constant coefficient."""
    horizon: int = Field(10_000, ge=1)
    """Number of completions over which the coefficient adapts. Only with `target`."""
    refresh_every: int | None = Field(None, ge=1)
    """Replace the reference model by the current policy every N steps. Default: keep the initial policy."""

    def unused_keys(self) -> dict[str, str]:
        if self.coefficient == 0:
            keys = ("estimator", "where", "target", "horizon", "refresh_every")
            return dict.fromkeys(keys, "not honoured with coefficient 0; give kl.coefficient or remove it")
        return {"horizon": "not honoured without kl.target; give a target or remove it"} if self.target is None else {}


class EntropyControl(Section):
    """Adaptive weight of the entropy bonus (Skywork-OR1). The bonus is applied only while the entropy is low."""

    target: float = Field(0.2, gt=0)
    """Target entropy per token, in nats. While the previous step's mean is at or below it, the bonus is applied and its
    weight rises; above it, the weight falls."""
    delta: float = Field(0.005, gt=0)
    """Change of the weight per step."""
    maximum: float = Field(1.0, gt=0)
    """Upper bound of the weight; the lower bound is 0. The initial weight is `entropy`."""


class CriticOptions(Section):
    """The value model: a network with one output and its own optimizer. Only for advantage `gae`."""

    network: Literal["own", "policy"] = "own"
    """`own`: a copy of the policy's network, made when the stage starts. `policy`: a value head on the policy's hidden
    states, which needs no extra memory; only the head learns from the value loss, and it needs a larger lr."""
    lr: float = Field(1e-5, gt=0)
    """Peak learning rate of the critic; schedule and warm-up are the trainer's."""
    value_clip: float | None = Field(0.2, gt=0)
    """Clipping range of value updates around the old value; null: no clipping."""
    warmup_steps: int = Field(0, ge=0)
    """Initial steps in which only the critic is trained (value pretraining)."""


class AdvantageSection(NamedSection):
    """Base of advantage estimators. The class attributes declare what an estimator needs."""

    compares_groups: ClassVar[bool] = True  #: needs at least two completions per group
    uses_critic: ClassVar[bool] = False
    uses_greedy: ClassVar[bool] = False  #: needs one greedy completion per task
    uses_parts: ClassVar[bool] = False  #: uses the parts of a reward instead of their sum
    uses_probabilities: ClassVar[bool] = False  #: needs the policy's distributions at the start of the step
    uses_episodes: ClassVar[bool] = False  #: handles rollouts with several experiences
    per_token: ClassVar[bool] = False  #: the function gives an advantage for each token


class GroupNormalised(AdvantageSection):
    """(r - mean) / (std + eps) within the group (GRPO)."""

    implementation = "rollmill.algorithms.advantages:grpo"
    name: Literal["grpo"] = "grpo"
    scale: Literal["group", "batch", "none"] = "group"
    """Standard deviation to divide by: that of the group, that of all rewards of the batch, or none."""
    ddof: Literal[0, 1] = 1
    """0: population, 1: sample standard deviation."""

    def unused_keys(self) -> dict[str, str]:
        return (
            {"ddof": "not honoured with scale `none`; it is with `group` and `batch`"} if self.scale == "none" else {}
        )


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


class MaskSection(NamedSection):
    """Base of masks, which choose the tokens of an optimizer step that the policy loss keeps. Masked tokens still count
    in the denominator."""

    uses_old: ClassVar[bool] = False  #: uses the old log-probs
    uses_expected_discriminant: ClassVar[bool] = False


if TYPE_CHECKING:  # at run time unions, which `rollmill.config.algorithms` makes of the sections beside the algorithms
    AdvantageConfig = AdvantageSection
    LossConfig = LossSection
    MaskConfig = MaskSection


class PolicyGradientOptions(AlgorithmOptions):
    """Options of all policy-gradient algorithms."""

    recipe = "rollmill.algorithms.policy_recipes:policy_gradient"

    advantage: AdvantageConfig = GroupNormalised()
    """Advantage estimator: a name or a section."""
    loss: LossConfig = PPOClipLoss()
    """Per-token loss: a name or a section."""
    kl: KLOptions = KLOptions()
    """KL penalty: its coefficient or a section."""
    entropy: float = Field(0.0, ge=0)
    """Weight of the entropy bonus."""
    entropy_control: EntropyControl | None = None
    """Adapt the weight of the entropy bonus to a target entropy. Default: constant weight."""
    aggregation: Aggregation = "token-mean"
    """Reduction of per-token terms to the loss, with one denominator for the whole optimizer step."""
    corrections: list[CorrectionConfig] = []
    """Importance weights for tokens that were not sampled by the old policy; several are multiplied."""
    masks: list[MaskConfig] = []
    """Masks that exclude tokens from the policy loss, computed over the whole optimizer step by one more forward
    pass."""
    proximal: Literal["auto", "rollout", "recompute", "interpolate"] = "auto"
    """Log-probs of the old policy: recorded by the rollout, recomputed before the first update, or interpolated between
    rollout and policy. `auto` recomputes them if there are corrections."""
    overlong_buffer: int = Field(0, ge=0)
    """Soft overlong penalty: completions longer than max_new_tokens - overlong_buffer lose up to 1 reward, linearly. 0
    turns it off."""
    drop_uniform_groups: bool = False
    """Exclude groups whose rewards are all equal from the denominator."""
    reset_optimizer: bool = False
    """Reset the optimizer's moments at the start of every training step."""
    critic: CriticOptions = CriticOptions()
    """The value model. Only for advantage `gae`."""

    @property
    def uses_reference(self) -> bool:
        """True with a KL penalty."""
        return self.kl.coefficient > 0

    @property
    def active_critic(self) -> CriticOptions | None:
        """The options of the critic, if the advantage estimator needs one."""
        return self.critic if self.advantage.uses_critic else None

    @model_validator(mode="before")
    @classmethod
    def _over_the_algorithms_own(cls, data: Any) -> Any:
        """Merges a part that is given in part with the algorithm's default, unless its `name` changes."""
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

    def unused_keys(self) -> dict[str, str]:
        keys, advantage = {}, self.advantage
        if not advantage.uses_critic:
            keys["critic"] = f"advantage `{advantage.name}` needs no critic; `gae` (algorithm ppo) does"
        else:
            keys["overlong_buffer"] = "not honoured by advantage `gae`; it is by those of whole completions"
            keys["drop_uniform_groups"] = "not honoured by advantage `gae`, which compares no groups"
        if not (self.loss.uses_old or self.corrections or any(mask.uses_old for mask in self.masks)):
            keys["proximal"] = f"loss `{self.loss.name}` looks at no old log-probs; remove it"
        if advantage.uses_greedy:
            keys["overlong_buffer"] = "not honoured by `remax`, whose greedy baseline it would not reach"
        return keys

    def conflicts(self) -> dict[str, str]:
        found = {}
        if self.advantage.uses_parts and self.kl.coefficient and self.kl.where == "reward":
            text = (
                f"advantage `{self.advantage.name}` sees the parts of the reward, which have no KL in them; use `loss`"
            )
            found["kl.where"] = text
        # all others weight by old / rollout, so that the two log-probs have to differ
        weights = [each for each in self.corrections if not isinstance(each, OffPolicyMask)]
        if weights and self.loss.to_rollout:
            text = f"`{self.loss.name}` is to the rollout policy already, and `{weights[0].name}` would count twice"
            found["corrections"] = f"{text}; remove it"
        elif weights and self.proximal == "rollout":
            text = f"with proximal `rollout` the old log-probs are the rollout's, so `{weights[0].name}` would correct"
            found["corrections"] = f"{text} nothing; set proximal: recompute"
        return found
