"""A recipe: everything the trainer needs to know about an algorithm, as data.

The trainer computes log-probs and sums terms; it never checks an algorithm's name. Shapes: N experiences, A tokens of
all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from torch import Tensor

from rollmill.algorithms.token_advantages import ValueTargets
from rollmill.config.algorithms.base import CriticOptions, EntropyControl, KLOptions
from rollmill.config.algorithms.distillation import DistillationOptions
from rollmill.types import ExperienceSource

Proximal = Literal["rollout", "recompute", "interpolate"]


class AdvantageInputs(NamedTuple):
    """Inputs of an advantage function: one entry per rollout experience, [N] unless noted."""

    rewards: Tensor  #: float64, NaN where missing
    groups: Tensor  #: int64 group ids
    lengths: Tensor  #: int64, action tokens
    episodes: Tensor  #: int64, id of the multi-step episode; by default one per experience
    anchors: Tensor  #: int64, id of the state the step was taken in; by default one per group
    greedy_rewards: Tensor  #: float64, of the greedy completion of the same prompt, NaN where missing
    step_rewards: Tensor  #: float64, of the single step, if an episode's steps are rewarded; else as `rewards`
    parts: dict[str, Tensor]  #: float64 [N] each, reward components by name, NaN where missing


class AdvantageResult(NamedTuple):
    """Result of an advantage function."""

    values: Tensor  #: [N], for every action token of the experience; for a token advantage [A]
    counted: Tensor  #: bool [N]: whether the experience counts in the denominators


class TokenAdvantageInputs(NamedTuple):
    """Further inputs of a token advantage, for the rollout experiences' action tokens, [A] each; None: not needed."""

    penalty: Tensor | None = None  #: float64, KL penalty subtracted from each token's reward
    logprob: Tensor | None = None  #: of the policy at the start of the training step
    collision: Tensor | None = None  #: the policy's squared probabilities, summed over the vocabulary


class MaskInputs(NamedTuple):
    """Inputs of a mask: all rollout tokens with a reward of one optimizer step, [n] each, across micro-batches."""

    logprob: Tensor  #: of the policy just before the optimizer step; like all fields without gradient
    old_logprob: Tensor
    rollout_logprob: Tensor
    advantage: Tensor
    entropy: Tensor
    dropped: Tensor  #: bool, True where the loss's clipping removes the gradient
    draw: Tensor  #: uniform random numbers, the same on all ranks
    sequence: Tensor  #: int64, index of the token's experience in the batch
    expected_discriminant: Tensor | None = None  #: sum_v p_v^2 (H + log p_v), if a mask uses it


class LossInputs(NamedTuple):
    """Inputs of a loss term: the action tokens of one source in one micro-batch, [tokens] each.

    Experiences are never split, so per-sequence quantities can be computed with `sequence`. Groups may be split, unless
    the recipe keeps them together.
    """

    logprob: Tensor  #: of the policy being trained, with gradient
    old_logprob: Tensor  #: of the policy the update is proximal to
    rollout_logprob: Tensor  #: as recorded by the rollout engine
    advantage: Tensor
    reward: Tensor  #: of the token's experience; NaN where missing
    entropy: Tensor  #: of the policy's next-token distribution; with gradient only if a term uses it
    reference_logprob: Tensor | None  #: of the frozen reference policy, if a term uses it
    staleness: Tensor  #: float, updates between the weights that sampled the token and those at the start of the step
    sequence: Tensor  #: int64, index of the token's experience in the micro-batch
    group: Tensor  #: int64, index of the token's group in the micro-batch
    divergence: Tensor | None = None  #: from the teacher, with gradient, if the recipe distils
    kl_baseline: Tensor | None = None  #: scalar: z0 of KTO over the whole optimizer step, if the recipe needs it
    kept: Tensor | None = None  #: bool, False where a mask drops the token; None: no masks
    selected: Tensor | None = None  #: bool, tokens that the loss selects over the whole step, if it does


@dataclass(frozen=True)
class LossTerm:
    """One summand of the loss: weight * sum_t aggregate_t * fn(inputs)_t over the tokens of one source."""

    name: str
    fn: Callable[[LossInputs], Tensor]
    aggregate: Callable[[Tensor], Tensor]  #: token counts [N] -> weight of each token of the experience [N]
    source: ExperienceSource = ExperienceSource.ROLLOUT
    weight: float | Callable[[int], float] = 1.0  #: a number, or a function of the training step, counted from 0
    uses_advantage: bool = False  #: the term is 0, and so is its gradient, where the advantage is 0
    only_positive: bool = False  #: also where it is negative; such tokens do not count in its denominator
    uses_reference: bool = False
    uses_entropy: bool = False
    is_kl: bool = False  #: the weight is multiplied by the current KL coefficient
    is_adaptive_entropy: bool = False  #: the weight is multiplied by the current entropy coefficient

    def weight_at(self, step: int) -> float:
        """The weight at a training step."""
        return self.weight(step) if callable(self.weight) else self.weight


@dataclass(frozen=True)
class Recipe:
    """An algorithm: advantage function, loss terms, KL penalty, off-policy correction and batch strategy."""

    name: str
    terms: tuple[LossTerm, ...]
    advantage: Callable[[AdvantageInputs], AdvantageResult] | None = None
    """None: no advantage per experience; a token advantage or a critic may give one."""
    token_advantage: Callable[[AdvantageInputs, Tensor, TokenAdvantageInputs], AdvantageResult] | None = None
    """Advantage per token: (inputs, sequence [A], inputs per token) -> result."""
    critic_advantage: Callable[[Tensor, Tensor, Tensor], ValueTargets] | None = None
    """(values [A], rewards [A], sequence [A]) -> advantages and the critic's targets, over the rollout tokens."""
    critic: CriticOptions | None = None
    distill: DistillationOptions | None = None
    teacher_prompts: bool = False  #: experiences count only if they have a `teacher_prompt`
    kl: KLOptions = field(default_factory=KLOptions)
    entropy: float = 0.0  #: weight of the entropy bonus; with entropy control that of the first step
    entropy_control: EntropyControl | None = None
    proximal: Proximal = "rollout"  #: source of old log-probs that are not the policy's own
    keep_groups_together: bool = False  #: a group is never split between micro-batches
    uses_kto_baseline: bool = False
    """Whether `LossInputs.kl_baseline` is needed."""
    reset_optimizer: bool = False
    dropped: Callable[[LossInputs | MaskInputs], Tensor] | None = None
    """bool [tokens], True where clipping removes the gradient."""
    masks: tuple[Callable[[MaskInputs], Tensor], ...] = ()
    """bool [n] each: tokens of an optimizer step that the policy term keeps. Masks cost a forward pass."""
    selection: Callable[[MaskInputs], Tensor] | None = None
    """bool [n]: tokens of an optimizer step that the loss treats differently."""
    uses_probabilities: bool = False  #: the advantage needs the policy's distributions at the start of the step
    uses_expected_discriminant: bool = False  #: a mask needs them just before the optimizer step
    measures: Callable[[LossInputs], dict[str, Tensor]] | None = (
        None  #: metrics of preferences, one value per pair or completion
    )
    domains: Mapping[str, Recipe] = field(default_factory=dict)
    """Recipe of the experiences of each domain: its advantages, terms and clipping. Everything else is this recipe's,
    as are experiences of no domain."""

    def of_domain(self, name: str) -> Recipe:
        """The recipe of a domain's experiences; this one for "" and in a stage without domains."""
        return self.domains.get(name, self)

    @property
    def compares_rewards(self) -> bool:
        """True if rollouts have an advantage."""
        return any(each is not None for each in (self.advantage, self.token_advantage, self.critic_advantage))

    @property
    def uses_reference(self) -> bool:
        """True if a frozen reference model is needed."""
        inside = any(each.uses_reference for each in self.domains.values())
        return inside or any(term.uses_reference for term in self.terms) or self.kl_in_reward

    @property
    def kl_in_reward(self) -> bool:
        """True if the KL penalty is subtracted from the reward."""
        return self.kl.coefficient > 0 and self.kl.where == "reward"

    @property
    def needs_step_statistics(self) -> bool:
        """True if masks or a selection apply to whole optimizer steps."""
        return bool(self.masks) or self.selection is not None

    @property
    def uses_entropy(self) -> bool:
        """True if the entropy needs a gradient."""
        return any(term.uses_entropy for recipe in (self, *self.domains.values()) for term in recipe.terms)
