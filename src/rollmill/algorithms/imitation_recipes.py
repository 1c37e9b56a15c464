"""Recipes of algorithms that imitate: demonstrations, alone or beside rollouts, and teachers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

import rollmill.algorithms.losses as losses
from rollmill.algorithms.policy_recipes import RecipeSettings, Weight, policy_gradient
from rollmill.algorithms.recipe import LossInputs, LossTerm, Recipe
from rollmill.config.algorithms.demonstrations import CHORD, MIX, SFT, SFTPhi
from rollmill.config.algorithms.distillation import DistillationOptions
from rollmill.types import ExperienceSource

TokenLoss = Callable[[Tensor], Tensor]
"""A loss per token, [T], of the policy's log-probs of a demonstration's tokens."""


def sft(options: SFT, settings: RecipeSettings, loss: TokenLoss = losses.negative_log_likelihood) -> Recipe:
    """Build supervised fine-tuning with a loss per token."""
    return Recipe(options.name, (_imitation_term(loss, 1.0, settings.aggregation(options.aggregation)),))


def sft_importance(options: SFT, settings: RecipeSettings) -> Recipe:
    """Build supervised fine-tuning with importance sampling (CHORD, arXiv:2508.11408)."""
    return sft(options, settings, losses.importance_sft)


def sft_phi(options: SFTPhi, settings: RecipeSettings) -> Recipe:
    """Build supervised fine-tuning with CHORD's phi function (arXiv:2508.11408)."""
    return sft(options, settings, partial(losses.chord_sft, cutoff=options.cutoff))


def mix(options: MIX, settings: RecipeSettings) -> Recipe:
    """Build GRPO on rollouts and imitation of demonstrations in fixed shares (arXiv:2505.17826)."""
    term = _imitation_term(losses.negative_log_likelihood, options.mu, settings.aggregation("token-mean"))
    return policy_gradient(options, settings, share=1 - options.mu, imitation=[term])


def chord(options: CHORD, settings: RecipeSettings) -> Recipe:
    """Build GRPO on rollouts and imitation with a share that changes over the steps (arXiv:2508.11408)."""
    mu = partial(losses.chord_mu, warmup=options.warmup, decay=options.decay, peak=options.peak, valley=options.valley)
    loss = losses.chord_sft if options.token_weights else losses.negative_log_likelihood
    term = _imitation_term(loss, mu, settings.aggregation("token-mean"))
    return policy_gradient(options, settings, share=lambda step: 1 - mu(step), imitation=[term])


def distillation(options: DistillationOptions, settings: RecipeSettings, *, teacher_prompts: bool = False) -> Recipe:
    """Build on-policy distillation, whose teacher gives a divergence for each token.

    Args:
        teacher_prompts: the teacher has prompts of its own.
    """
    term = LossTerm("distill", _divergence, settings.aggregation(options.aggregation))
    return Recipe(options.name, (term,), distill=options, teacher_prompts=teacher_prompts)


def self_distillation(options: DistillationOptions, settings: RecipeSettings) -> Recipe:
    """Build distillation from the policy itself, shown more than the policy."""
    return distillation(options, settings, teacher_prompts=True)


def _divergence(inputs: LossInputs) -> Tensor:
    assert inputs.divergence is not None
    return inputs.divergence


def _imitation_term(loss: TokenLoss, weight: Weight, aggregate: Callable[[Tensor], Tensor]) -> LossTerm:
    """Build an imitation term, with its own denominator over the demonstrations."""
    return LossTerm(
        "sft", lambda inputs: loss(inputs.logprob), aggregate, source=ExperienceSource.EXPERT, weight=weight
    )
