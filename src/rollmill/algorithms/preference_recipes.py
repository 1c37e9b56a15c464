"""Recipes of algorithms that learn from preferences: pairs, or labelled completions.

A loss per pair or completion is repeated on all of its tokens; the aggregation `sequence-mean` turns it into the mean
over pairs or completions.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

import rollmill.algorithms.preference as preference
from rollmill.algorithms.aggregation import expand_to_tokens, sequence_mean, sum_by_sequence
from rollmill.algorithms.policy_recipes import RecipeSettings
from rollmill.algorithms.recipe import LossInputs, LossTerm, Recipe
from rollmill.config.algorithms.preferences import DPO, KTO, ORPO
from rollmill.types import ExperienceSource


def dpo(options: DPO, settings: RecipeSettings) -> Recipe:
    """Build the recipe of DPO or IPO. Pairs are groups of two; the chosen completion has the greater reward."""
    loss = (
        partial(preference.dpo, beta=options.beta, label_smoothing=options.label_smoothing)
        if options.loss == "sigmoid"
        else partial(preference.ipo, beta=options.beta)
    )

    def log_probs(inputs: LossInputs) -> tuple[Tensor, ...]:
        assert inputs.reference_logprob is not None
        policy, reference = (
            _pairs(each, inputs, mean=options.normalise) for each in (inputs.logprob, inputs.reference_logprob)
        )
        return (*policy, *reference)

    def pairs(inputs: LossInputs) -> Tensor:
        return expand_to_tokens(loss(*log_probs(inputs)), inputs.group)

    def measures(inputs: LossInputs) -> dict[str, Tensor]:
        chosen, rejected, reference_chosen, reference_rejected = log_probs(inputs)
        gained, lost = options.beta * (chosen - reference_chosen), options.beta * (rejected - reference_rejected)
        return _pair_metrics(gained, lost)

    terms = [LossTerm("dpo", pairs, sequence_mean, source=ExperienceSource.PREFERENCE, uses_reference=True)]
    if options.sft:
        terms.append(_imitation(options.sft))
    return Recipe(options.name, tuple(terms), keep_groups_together=True, measures=measures)


def orpo(options: ORPO, settings: RecipeSettings) -> Recipe:
    """Build the recipe of ORPO, which imitates the chosen completion and needs no reference."""

    def pairs(inputs: LossInputs) -> Tensor:
        return expand_to_tokens(preference.orpo(*_pairs(inputs.logprob, inputs, mean=True)), inputs.group)

    def measures(inputs: LossInputs) -> dict[str, Tensor]:
        chosen, rejected = _pairs(inputs.logprob, inputs, mean=True)
        odds = preference.log_odds(chosen) - preference.log_odds(rejected)
        return _pair_metrics(chosen, rejected) | {"pairs/log_odds": odds}

    odds = LossTerm("orpo", pairs, sequence_mean, source=ExperienceSource.PREFERENCE, weight=options.weight)
    return Recipe(options.name, (_imitation(1.0), odds), keep_groups_together=True, measures=measures)


def kto(options: KTO, settings: RecipeSettings) -> Recipe:
    """Build the recipe of KTO, whose completions are labelled one by one."""
    loss = partial(
        preference.kto,
        beta=options.beta,
        desirable_weight=options.desirable_weight,
        undesirable_weight=options.undesirable_weight,
    )

    def log_ratios(inputs: LossInputs) -> tuple[Tensor, Tensor, Tensor]:
        """Log-ratio and desirability of each completion, and z0."""
        assert inputs.reference_logprob is not None
        assert inputs.kl_baseline is not None
        ratio = sum_by_sequence(inputs.logprob - inputs.reference_logprob, inputs.sequence)
        return ratio, _by_sequence(inputs.reward, inputs.sequence, len(ratio)) > 0, inputs.kl_baseline

    def completions(inputs: LossInputs) -> Tensor:
        return expand_to_tokens(loss(*log_ratios(inputs)), inputs.sequence)

    def measures(inputs: LossInputs) -> dict[str, Tensor]:
        ratio, desirable, baseline = log_ratios(inputs)
        right = torch.where(desirable, ratio > baseline, ratio < baseline).double()
        right = torch.where(ratio == baseline, 0.5, right)
        gain = options.beta * ratio
        return {
            "labels/accuracy": right,
            "labels/desirable": gain[desirable],
            "labels/undesirable": gain[~desirable],
            "labels/baseline": baseline.expand(len(ratio)),
        }

    term = LossTerm("kto", completions, sequence_mean, source=ExperienceSource.PREFERENCE, uses_reference=True)
    return Recipe(options.name, (term,), measures=measures, uses_kto_baseline=True)


def _imitation(weight: float) -> LossTerm:
    """-log p of the chosen completion, mean over its tokens, mean over pairs."""

    def chosen(inputs: LossInputs) -> Tensor:
        return torch.where(
            inputs.reward > 0, -2 * inputs.logprob, 0
        )  # times 2, since the mean includes the rejected ones

    return LossTerm("sft", chosen, sequence_mean, source=ExperienceSource.PREFERENCE, weight=weight)


def _pairs(logprob: Tensor, inputs: LossInputs, *, mean: bool) -> tuple[Tensor, Tensor]:
    """Log-probs of the chosen and the rejected completion of each pair."""
    count = int(inputs.sequence.max()) + 1
    pair = _by_sequence(inputs.group, inputs.sequence, count)
    chosen = _by_sequence(inputs.reward, inputs.sequence, count) > 0
    return preference.pair_logprobs(logprob, inputs.sequence, pair, chosen, mean=mean)


def _pair_metrics(chosen: Tensor, rejected: Tensor) -> dict[str, Tensor]:
    right = (chosen > rejected).double() + 0.5 * (chosen == rejected).double()
    margin = chosen - rejected
    return {"pairs/accuracy": right, "pairs/margin": margin, "pairs/chosen": chosen, "pairs/rejected": rejected}


def _by_sequence(values: Tensor, sequence: Tensor, count: int) -> Tensor:
    """[tokens] -> [N]: the value shared by all tokens of a sequence."""
    return values.new_zeros(count).index_copy_(0, sequence, values)
