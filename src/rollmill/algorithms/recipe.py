"""A recipe: everything the trainer needs to know about an algorithm, as data.

The trainer computes log-probs and sums terms; it never asks for an algorithm's name. Shapes: N experiences, A tokens of
all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from torch import Tensor

from rollmill.algorithms.token_advantages import ValueTargets
from rollmill.config.algorithm import CriticOptions, EntropyControl, KLOptions
from rollmill.recipes.distillation import DistillationOptions
from rollmill.types import ExperienceSource

Proximal = Literal["rollout", "recompute", "interpolate"]


class AdvantageInputs(NamedTuple):
    """What an advantage function sees: one entry per usual experience, [N] unless said otherwise."""

    rewards: Tensor  #: float64, NaN where missing
    groups: Tensor  #: int64 group ids
    lengths: Tensor  #: int64, action tokens
    episodes: Tensor  #: int64, which episode of several steps the experience belongs to; by default its own
    anchors: Tensor  #: int64, the state the step was taken in; by default the group's
    greedy_rewards: Tensor  #: float64, of the greedy completion of the same prompt, NaN where there is none
    step_rewards: Tensor  #: float64, of the step alone, where an episode's steps are rewarded; else as `rewards`
    parts: dict[str, Tensor]  #: float64 [N] each, the parts of the reward by name, NaN where missing


class AdvantageResult(NamedTuple):
    """What an advantage function returns."""

    values: Tensor  #: [N], of every action token of the experience; of a token advantage [A], one per token
    counted: Tensor  #: bool [N]: whether the experience enters the denominators


class TokenAdvantageInputs(NamedTuple):
    """What a token advantage sees of the usual experiences' action tokens, [A] each; None: the recipe needs none."""

    penalty: Tensor | None = None  #: float64, what the KL to the reference takes off each token's reward
    logprob: Tensor | None = None  #: of the policy at the start of the training step
    collision: Tensor | None = None  #: sum over the vocabulary of its squared probabilities


class MaskInputs(NamedTuple):
    """What a mask sees: all judged usual tokens of one optimizer step, [n] each, whatever the micro-batches are."""

    logprob: Tensor  #: of the policy just before the optimizer step, without gradient, as all the others
    old_logprob: Tensor
    rollout_logprob: Tensor
    advantage: Tensor
    entropy: Tensor
    dropped: Tensor  #: bool, where the loss's own clipping takes the gradient away
    draw: Tensor  #: uniform random numbers, the same on all ranks
    sequence: Tensor  #: int64, which experience of the batch the token belongs to
    expected_discriminant: Tensor | None = None  #: sum_v p_v^2 (H + log p_v), if a mask asks for it


class LossInputs(NamedTuple):
    """What a loss term sees: the action tokens of one source in one micro-batch, [tokens] each.

    Experiences are never cut, so per-sequence quantities can be formed with `sequence`. Groups are cut, unless the
    recipe keeps them whole.
    """

    logprob: Tensor  #: of the policy being trained, with gradient
    old_logprob: Tensor  #: of the policy the update is proximal to
    rollout_logprob: Tensor  #: as recorded by the rollout engine
    advantage: Tensor
    reward: Tensor  #: of the token's experience; NaN where missing
    entropy: Tensor  #: of the policy's next-token distribution; with gradient only if a term asks for it
    reference_logprob: Tensor | None  #: of the frozen reference policy, if a term asks for it
    staleness: Tensor  #: float, updates between the weights that sampled the token and those at the start of the step
    sequence: Tensor  #: int64, which experience of the micro-batch the token belongs to
    group: Tensor  #: int64, which group of the micro-batch
    divergence: Tensor | None = None  #: from the teacher, with gradient, if the recipe distils
    kl_baseline: Tensor | None = None  #: a number: z0 of KTO, over the whole optimizer step, if the recipe needs it
    kept: Tensor | None = None  #: bool, False where a mask leaves the token out; None: there are no masks
    selected: Tensor | None = None  #: bool, the tokens that the loss selects over the whole step, if it does


@dataclass(frozen=True)
class LossTerm:
    """One summand of the loss: weight * sum_t aggregate_t * fn(inputs)_t over the tokens of one source."""

    name: str
    fn: Callable[[LossInputs], Tensor]
    aggregate: Callable[[Tensor], Tensor]  #: token counts [N] -> weight of each token of the experience [N]
    source: ExperienceSource = ExperienceSource.ROLLOUT
    weight: float | Callable[[int], float] = 1.0  #: a number, or a function of the training step, counted from 0
    uses_advantage: bool = False  #: the term is 0, and so is its gradient, where the advantage is 0
    only_positive: bool = False  #: and where it is negative; such tokens do not count in its denominator
    uses_reference: bool = False
    uses_entropy: bool = False
    is_kl: bool = False  #: its weight is multiplied by the KL coefficient of the moment
    is_adaptive_entropy: bool = False  #: its weight is multiplied by the entropy coefficient of the moment

    def weight_at(self, step: int) -> float:
        """The weight at a training step."""
        return self.weight(step) if callable(self.weight) else self.weight


@dataclass(frozen=True)
class Recipe:
    """An algorithm: advantage function, loss terms, KL penalty, off-policy correction and batch strategy."""

    name: str
    terms: tuple[LossTerm, ...]
    advantage: Callable[[AdvantageInputs], AdvantageResult] | None = (
        None  #: None: nothing is compared, or a critic does it
    )
    token_advantage: Callable[[AdvantageInputs, Tensor, TokenAdvantageInputs], AdvantageResult] | None = None
    """The same per token: (inputs, sequence [A], scores of the tokens)."""
    critic_advantage: Callable[[Tensor, Tensor, Tensor], ValueTargets] | None = None
    """(values [A], rewards [A], sequence [A]) -> advantages and the critic's targets, over the usual tokens."""
    critic: CriticOptions | None = None
    distill: DistillationOptions | None = None
    teacher_prompts: bool = False  #: experiences count only if they have a `teacher_prompt`
    kl: KLOptions = field(default_factory=KLOptions)
    entropy: float = 0.0  #: weight of the entropy bonus, of the first step if it is steered
    entropy_control: EntropyControl | None = None
    proximal: Proximal = "rollout"  #: where old log-probs come from when they are not the policy's own
    keep_groups_together: bool = False  #: a group is never cut between micro-batches
    uses_kto_baseline: bool = False
    """Whether `kl_baseline` is needed: log-ratios of completions after prompts that are not their own."""
    reset_optimizer: bool = False
    dropped: Callable[[LossInputs | MaskInputs], Tensor] | None = None
    """bool [tokens], where clipping takes the gradient away."""
    masks: tuple[Callable[[MaskInputs], Tensor], ...] = ()
    """bool [n] each: the tokens of an optimizer step that the policy term keeps. They cost a forward pass."""
    selection: Callable[[MaskInputs], Tensor] | None = None
    """bool [n]: the tokens of an optimizer step that its loss treats differently."""
    uses_probabilities: bool = False  #: the advantage needs the policy's distributions at the start of the step
    uses_expected_discriminant: bool = False  #: a mask does, just before the optimizer step
    measures: Callable[[LossInputs], dict[str, Tensor]] | None = None  #: of pairs: metrics, one value per pair

    @property
    def uses_reference(self) -> bool:
        """Whether a frozen reference model is needed."""
        return any(term.uses_reference for term in self.terms) or self.kl_in_reward

    @property
    def kl_in_reward(self) -> bool:
        """Whether the KL penalty is taken off the reward."""
        return self.kl.coefficient > 0 and self.kl.where == "reward"

    @property
    def needs_step_statistics(self) -> bool:
        """Whether something is chosen over whole optimizer steps."""
        return bool(self.masks) or self.selection is not None

    @property
    def uses_entropy(self) -> bool:
        """Whether the entropy needs a gradient."""
        return any(term.uses_entropy for term in self.terms)
