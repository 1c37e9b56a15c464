"""Builds recipes from the `algorithm` section of a run file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import rollmill.algorithms.advantages as advantages
import rollmill.algorithms.kl as kl
import rollmill.algorithms.losses as supervised
from rollmill.algorithms.aggregation import get_aggregation
from rollmill.algorithms.binding import (
    bind_advantage,
    bind_clip_indicator,
    bind_correction,
    bind_loss,
    bind_mask,
    bind_selection,
)
from rollmill.algorithms.losses import negative_log_likelihood
from rollmill.algorithms.preference_recipes import build_preference_recipe
from rollmill.algorithms.recipe import (
    AdvantageInputs,
    AdvantageResult,
    LossInputs,
    LossTerm,
    Proximal,
    Recipe,
    TokenAdvantageInputs,
)
from rollmill.algorithms.token_advantages import (
    ValueTargets,
    gae,
    length_adaptive_lambda,
    optimal_token_baseline,
    reinforce_plus_plus,
)
from rollmill.config.algorithms.base import AlgorithmOptions, PolicyGradientOptions
from rollmill.config.algorithms.baselines import BatchNormalised, RewardPartsNormalised
from rollmill.config.algorithms.credit_assignment import GAE, OptimalTokenBaseline
from rollmill.config.algorithms.demonstrations import CHORD, MIX, SFT, SFTImportance, SFTPhi
from rollmill.config.algorithms.distillation import DistillationOptions, SelfDistill
from rollmill.config.algorithms.preferences import DPO, KTO, ORPO
from rollmill.types import ExperienceSource

Weight = float | Callable[[int], float]


def build_recipe(
    options: AlgorithmOptions, *, max_new_tokens: int, reward_weights: Mapping[str, float] | None = None
) -> Recipe:
    """Builds the recipe of an `algorithm` section.

    Args:
        options: the section, one of the classes of `rollmill.config.algorithms` or a user's.
        max_new_tokens: maximum length of a completion, for the `constant` aggregation and the overlong penalty.
        reward_weights: reward component -> its weight; only for advantages computed from components.
    """
    if isinstance(options, SFT):
        terms = (
            _imitation_term(_imitation(options), 1.0, get_aggregation(options.aggregation, max_length=max_new_tokens)),
        )
        return Recipe(options.name, terms)
    if isinstance(options, DPO | ORPO | KTO):
        return build_preference_recipe(options)
    if isinstance(options, DistillationOptions):
        term = LossTerm("distill", _divergence, get_aggregation(options.aggregation, max_length=max_new_tokens))
        return Recipe(options.name, (term,), distill=options, teacher_prompts=isinstance(options, SelfDistill))
    assert isinstance(options, PolicyGradientOptions)
    share: Weight = 1.0
    imitation: tuple[LossTerm, ...] = ()
    token_mean = get_aggregation("token-mean", max_length=max_new_tokens)
    if isinstance(options, MIX):
        share = 1 - options.mu
        imitation = (_imitation_term(negative_log_likelihood, options.mu, token_mean),)
    if isinstance(options, CHORD):
        mu = partial(
            supervised.chord_mu, warmup=options.warmup, decay=options.decay, peak=options.peak, valley=options.valley
        )
        share = lambda step: 1 - mu(step)  # noqa: E731
        fn = supervised.chord_sft if options.token_weights else negative_log_likelihood
        imitation = (_imitation_term(fn, mu, token_mean),)
    by_token = isinstance(options.advantage, BatchNormalised | OptimalTokenBaseline)
    per_token = by_token or isinstance(options.advantage, GAE)
    return Recipe(
        options.name,
        (*_policy_terms(options, max_new_tokens, share), *imitation),
        advantage=None if per_token else _advantage(options, max_new_tokens, reward_weights),
        token_advantage=_token_advantage(options, max_new_tokens) if by_token else None,
        critic_advantage=partial(_gae, options.advantage) if isinstance(options.advantage, GAE) else None,
        critic=options.critic if isinstance(options.advantage, GAE) else None,
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
                replace(term, weight=_scale_weight(term.weight, recipe.kl.coefficient), is_kl=False)
                if term.is_kl
                else term
                for term in terms
            )
        fixed[name] = replace(recipe, terms=terms)
    uses = any(each.uses_probabilities for each in domains.values())
    return replace(stage, domains=fixed, uses_probabilities=stage.uses_probabilities or uses)


def _policy_terms(options: PolicyGradientOptions, max_new_tokens: int, share: Weight) -> tuple[LossTerm, ...]:
    """Builds the policy loss, and KL penalty and entropy bonus if enabled, all multiplied by `share`."""
    aggregate = get_aggregation(options.aggregation, max_length=max_new_tokens)
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
        weight = _scale_weight(share, -1 if adaptive else -options.entropy)
        terms.append(replace(term, weight=weight, is_adaptive_entropy=adaptive))
    return tuple(terms)


def _divergence(inputs: LossInputs) -> Tensor:
    assert inputs.divergence is not None
    return inputs.divergence


def _imitation_term(fn: Callable[[Tensor], Tensor], weight: Weight, aggregate: Callable[[Tensor], Tensor]) -> LossTerm:
    """Builds an imitation term, with its own denominator over the demonstrations."""
    return LossTerm("sft", lambda inputs: fn(inputs.logprob), aggregate, source=ExperienceSource.EXPERT, weight=weight)


def _imitation(options: SFT) -> Callable[[Tensor], Tensor]:
    if isinstance(options, SFTImportance):
        return supervised.importance_sft
    if isinstance(options, SFTPhi):
        return partial(supervised.chord_sft, cutoff=options.cutoff)
    return negative_log_likelihood


def _scale_weight(weight: Weight, factor: float) -> Weight:
    return (lambda step: weight(step) * factor) if callable(weight) else weight * factor


def _proximal(options: PolicyGradientOptions) -> Proximal:
    if options.proximal == "auto":
        return "recompute" if options.corrections else "rollout"
    return options.proximal


def _advantage(
    options: PolicyGradientOptions, max_new_tokens: int, reward_weights: Mapping[str, float] | None
) -> Callable[[AdvantageInputs], AdvantageResult]:
    function: Callable[[AdvantageInputs], Tensor]
    knows_episodes = options.advantage.uses_episodes
    if isinstance(options.advantage, RewardPartsNormalised):
        function = partial(_per_reward_advantage, options.advantage, reward_weights or {})
    else:
        function = bind_advantage(options.advantage)

    def advantage(inputs: AdvantageInputs) -> AdvantageResult:
        inputs, counted = _shape_rewards(options, max_new_tokens, inputs)
        if options.advantage.uses_greedy:
            counted = counted & ~inputs.greedy_rewards.isnan()
        if options.drop_uniform_groups and options.advantage.uses_parts:
            parts = [inputs.parts[name] for name, weight in _weights(inputs, reward_weights or {}).items() if weight]
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
    options: PolicyGradientOptions, max_new_tokens: int, inputs: AdvantageInputs
) -> tuple[AdvantageInputs, Tensor]:
    """Adds the overlong penalty; also returns which experiences have a reward."""
    if options.overlong_buffer:
        penalty = advantages.overlong_penalty(inputs.lengths, max_new_tokens, options.overlong_buffer)
        inputs = inputs._replace(rewards=inputs.rewards + penalty, parts={**inputs.parts, "overlong": penalty.double()})
    return inputs, ~inputs.rewards.isnan()


def _token_advantage(
    options: PolicyGradientOptions, max_new_tokens: int
) -> Callable[[AdvantageInputs, Tensor, TokenAdvantageInputs], AdvantageResult]:
    part = options.advantage

    def advantage(inputs: AdvantageInputs, sequence: Tensor, scores: TokenAdvantageInputs) -> AdvantageResult:
        inputs, counted = _shape_rewards(options, max_new_tokens, inputs)
        if options.drop_uniform_groups:
            counted = counted & ~advantages.uniform_groups(inputs.rewards, inputs.groups)
        rewards, groups, episodes = inputs.rewards, inputs.groups, inputs.episodes
        if isinstance(part, BatchNormalised):
            values = reinforce_plus_plus(
                rewards,
                groups,
                sequence,
                scores.penalty,
                episodes_S=episodes,
                baseline=part.baseline,
                ddof=part.ddof,
            )
        else:
            assert isinstance(part, OptimalTokenBaseline)
            assert scores.logprob is not None
            assert scores.collision is not None
            values = optimal_token_baseline(
                rewards,
                groups,
                sequence,
                scores.logprob,
                scores.collision,
                scores.penalty,
                episodes_S=episodes,
                zero_tail=part.zero_tail,
            )
        return AdvantageResult(values, counted)

    return advantage


def _weights(inputs: AdvantageInputs, reward_weights: Mapping[str, float]) -> dict[str, float]:
    """Weight of every component; those named `reward/key` have the weight of `reward`."""
    return {name: reward_weights.get(name, reward_weights.get(name.partition("/")[0], 1.0)) for name in inputs.parts}


def _per_reward_advantage(
    options: RewardPartsNormalised, reward_weights: Mapping[str, float], inputs: AdvantageInputs
) -> Tensor:
    weights = list(_weights(inputs, reward_weights).values())
    return advantages.gdpo(
        torch.stack(list(inputs.parts.values()), dim=1),
        inputs.groups,
        weights=weights,
        ddof=options.ddof,
        whitened=options.whitened,
    )


def _gae(options: GAE, values: Tensor, rewards: Tensor, sequence: Tensor) -> ValueTargets:
    lam: float | Tensor = options.lam
    if options.length_alpha is not None:
        lam = length_adaptive_lambda(torch.bincount(sequence), options.length_alpha)
    advantage = gae(values, rewards, sequence, gamma=options.gamma, lam=lam).advantages
    returns = gae(values, rewards, sequence, gamma=options.gamma, lam=options.critic_lam).returns
    if options.whiten:
        counted = ~torch.isin(sequence, sequence[rewards.isnan()])
        advantage = advantages.whiten(advantage, counted)
    return ValueTargets(advantage, returns)
