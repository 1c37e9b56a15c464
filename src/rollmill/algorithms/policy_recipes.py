"""Builds recipes from the `algorithm` section of a run file; here, those of policy-gradient algorithms."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

import rollmill.algorithms.advantages as advantages
import rollmill.algorithms.kl as kl
from rollmill.algorithms.aggregation import get_aggregation
from rollmill.algorithms.binding import (
    bind_advantage,
    bind_clip_indicator,
    bind_correction,
    bind_loss,
    bind_mask,
    bind_options,
    bind_selection,
)
from rollmill.algorithms.recipe import (
    AdvantageInputs,
    AdvantageResult,
    LossInputs,
    LossTerm,
    Proximal,
    Recipe,
    TokenAdvantageInputs,
)
from rollmill.config.algorithms.base import AlgorithmOptions, PolicyGradientOptions
from rollmill.registry import import_object

Weight = float | Callable[[int], float]


@dataclass(frozen=True, slots=True)
class RecipeSettings:
    """The part of the run besides the `algorithm` section that a recipe uses.

    Args:
        max_new_tokens: maximum length of a completion, for the `constant` aggregation and the overlong penalty.
        reward_weights: reward component -> its weight; only for advantages computed from components.
    """

    max_new_tokens: int
    reward_weights: Mapping[str, float] = field(default_factory=dict)

    def aggregation(self, name: str) -> Callable[[Tensor], Tensor]:
        """Find the reduction of per-token terms by its name in the run file."""
        return get_aggregation(name, max_length=self.max_new_tokens)


def build_recipe(
    options: AlgorithmOptions, *, max_new_tokens: int, reward_weights: Mapping[str, float] | None = None
) -> Recipe:
    """Build the recipe of an `algorithm` section, by the function that its class names.

    Args:
        options: the section, one of the classes of `rollmill.config.algorithms` or a user's.
        max_new_tokens, reward_weights: of RecipeSettings.
    """
    recipe: Recipe = import_object(options.recipe)(options, RecipeSettings(max_new_tokens, reward_weights or {}))
    return recipe


def policy_gradient(
    options: PolicyGradientOptions, settings: RecipeSettings, *, share: Weight = 1.0, imitation: Sequence[LossTerm] = ()
) -> Recipe:
    """Build the recipe of a policy-gradient algorithm.

    Args:
        share: weight of the terms on rollouts.
        imitation: terms on demonstrations.
    """
    advantage = options.advantage
    by_completion = not (advantage.per_token or advantage.uses_critic)
    return Recipe(
        options.name,
        (*_policy_terms(options, settings, share), *imitation),
        advantage=_advantage(options, settings) if by_completion else None,
        token_advantage=_token_advantage(options, settings) if advantage.per_token else None,
        critic_advantage=bind_options(advantage) if advantage.uses_critic else None,
        critic=options.active_critic,
        kl=options.kl,
        entropy=options.entropy,
        entropy_control=options.entropy_control,
        proximal=_proximal(options),
        reset_optimizer=options.reset_optimizer,
        dropped=bind_clip_indicator(options.loss),
        masks=tuple(bind_mask(mask) for mask in options.masks),
        selection=bind_selection(options.loss),
        uses_probabilities=options.advantage.uses_probabilities,
        uses_expected_discriminant=any(mask.uses_expected_discriminant for mask in options.masks),
    )


def combine_recipes(stage: Recipe, domains: Mapping[str, Recipe]) -> Recipe:
    """Builds the recipe of a stage with domains from the stage's own and those of its domains.

    Where the KL coefficient or the entropy weight adapts, all domains share it; else each domain's is fixed here.
    """
    fixed = {}
    for name, recipe in domains.items():
        terms = recipe.terms
        if stage.kl.target is None:
            terms = tuple(
                replace(term, weight=scale_weight(term.weight, recipe.kl.coefficient), is_kl=False)
                if term.is_kl
                else term
                for term in terms
            )
        fixed[name] = replace(recipe, terms=terms)
    uses = any(each.uses_probabilities for each in domains.values())
    return replace(stage, domains=fixed, uses_probabilities=stage.uses_probabilities or uses)


def _policy_terms(options: PolicyGradientOptions, settings: RecipeSettings, share: Weight) -> tuple[LossTerm, ...]:
    """Builds the policy loss, and KL penalty and entropy bonus if enabled, all multiplied by `share`."""
    aggregate = settings.aggregation(options.aggregation)
    loss, weights = bind_loss(options.loss), [bind_correction(each) for each in options.corrections]

    def policy(inputs: LossInputs) -> Tensor:
        values = loss(inputs)
        for weight in weights:
            values = values * weight(inputs)
        return values if inputs.kept is None else torch.where(inputs.kept, values, 0)

    estimate = kl.get_kl_estimator(options.kl.estimator)

    def penalty(inputs: LossInputs) -> Tensor:
        assert inputs.reference_logprob is not None
        return estimate(inputs.logprob, inputs.reference_logprob, inputs.rollout_logprob)

    follows, positive = options.loss.follows_advantage, options.loss.only_positive
    terms = [LossTerm("policy", policy, aggregate, weight=share, uses_advantage=follows, only_positive=positive)]
    if options.kl.coefficient and options.kl.where == "loss":
        terms.append(LossTerm("kl", penalty, aggregate, weight=share, uses_reference=True, is_kl=True))
    adaptive = options.entropy_control is not None
    if options.entropy or adaptive:
        term = LossTerm("entropy", lambda inputs: inputs.entropy, aggregate, uses_entropy=True)
        weight = scale_weight(share, -1 if adaptive else -options.entropy)
        terms.append(replace(term, weight=weight, is_adaptive_entropy=adaptive))
    return tuple(terms)


def scale_weight(weight: Weight, factor: float) -> Weight:
    return (lambda step: weight(step) * factor) if callable(weight) else weight * factor


def _proximal(options: PolicyGradientOptions) -> Proximal:
    if options.proximal == "auto":
        return "recompute" if options.corrections else "rollout"
    return options.proximal


def _advantage(
    options: PolicyGradientOptions, settings: RecipeSettings
) -> Callable[[AdvantageInputs], AdvantageResult]:
    by_part = bind_options(options.advantage)

    def of_parts(inputs: AdvantageInputs) -> Tensor:
        weights = list(_weights(inputs, settings.reward_weights).values())
        values: Tensor = by_part(torch.stack(list(inputs.parts.values()), dim=1), inputs.groups, weights=weights)
        return values

    function = of_parts if options.advantage.uses_parts else bind_advantage(options.advantage)
    knows_episodes = options.advantage.uses_episodes

    def advantage(inputs: AdvantageInputs) -> AdvantageResult:
        inputs, counted = _shape_rewards(options, settings, inputs)
        if options.advantage.uses_greedy:
            counted = counted & ~inputs.greedy_rewards.isnan()
        if options.drop_uniform_groups and options.advantage.uses_parts:
            parts = [inputs.parts[name] for name, weight in _weights(inputs, settings.reward_weights).items() if weight]
            uniform = torch.stack([advantages.uniform_groups(part, inputs.groups) for part in parts]).all(0)
            counted = counted & ~uniform
        elif options.drop_uniform_groups:
            counted = counted & ~advantages.uniform_groups(inputs.rewards, inputs.groups)
        return AdvantageResult(function(inputs) if knows_episodes else _advantage_by_episode(function, inputs), counted)

    return advantage


def _advantage_by_episode(function: Callable[[AdvantageInputs], Tensor], inputs: AdvantageInputs) -> Tensor:
    """Computes advantages in which a rollout with several experiences counts once; each of them gets its advantage.

    The rollout's reward is the mean of theirs, which differ if a pipeline operator changed one.
    """
    episodes, index = torch.unique(inputs.episodes, return_inverse=True)
    if len(episodes) == len(index):
        return function(inputs)
    first = torch.full_like(episodes, len(index)).scatter_reduce_(0, index, torch.arange(len(index)), "amin")
    lengths = torch.zeros_like(episodes).index_add_(0, index, inputs.lengths)

    def mean(values: Tensor) -> Tensor:
        """Mean over the rewards present; exact if all are equal."""
        scored = ~values.isnan()
        zeros = torch.zeros(len(episodes), dtype=values.dtype)
        lowest = torch.full_like(zeros, torch.inf).scatter_reduce_(0, index, values.nan_to_num(torch.inf), "amin")
        above = torch.where(scored, values - lowest[index], 0.0)
        return lowest + zeros.index_add(0, index, above) / zeros.index_add(0, index, scored.to(values.dtype))

    ones: dict[str, Any] = {key: each[first] for key, each in inputs._asdict().items() if isinstance(each, Tensor)}
    ones |= {"lengths": lengths, "parts": {name: mean(part) for name, part in inputs.parts.items()}}
    ones["rewards"] = mean(inputs.rewards)
    return function(AdvantageInputs(**ones))[index]


def _shape_rewards(
    options: PolicyGradientOptions, settings: RecipeSettings, inputs: AdvantageInputs
) -> tuple[AdvantageInputs, Tensor]:
    """Adds the overlong penalty; also returns which experiences have a reward."""
    if options.overlong_buffer:
        penalty = advantages.overlong_penalty(inputs.lengths, settings.max_new_tokens, options.overlong_buffer)
        inputs = inputs._replace(rewards=inputs.rewards + penalty, parts={**inputs.parts, "overlong": penalty.double()})
    return inputs, ~inputs.rewards.isnan()


def _token_advantage(
    options: PolicyGradientOptions, settings: RecipeSettings
) -> Callable[[AdvantageInputs, Tensor, TokenAdvantageInputs], AdvantageResult]:
    function = bind_options(options.advantage)

    def advantage(inputs: AdvantageInputs, sequence: Tensor, scores: TokenAdvantageInputs) -> AdvantageResult:
        inputs, counted = _shape_rewards(options, settings, inputs)
        if options.drop_uniform_groups:
            counted = counted & ~advantages.uniform_groups(inputs.rewards, inputs.groups)
        probabilities = (scores.logprob, scores.collision) if options.advantage.uses_probabilities else ()
        values = function(
            *(inputs.rewards, inputs.groups, sequence, *probabilities, scores.penalty), episodes_S=inputs.episodes
        )
        return AdvantageResult(values, counted)

    return advantage


def _weights(inputs: AdvantageInputs, reward_weights: Mapping[str, float]) -> dict[str, float]:
    """Weight of every component; those named `reward/key` have the weight of `reward`."""
    return {name: reward_weights.get(name, reward_weights.get(name.partition("/")[0], 1.0)) for name in inputs.parts}
