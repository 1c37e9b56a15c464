"""Supervised fine-tuning: -log p of the expert's tokens."""

from __future__ import annotations

from rollmill.algorithms.aggregation import aggregation
from rollmill.algorithms.losses import negative_log_likelihood
from rollmill.algorithms.recipe import LossTerm, Recipe
from rollmill.config.algorithm import Aggregation, SFTOptions
from rollmill.core.types import Source


def build(options: SFTOptions, max_new_tokens: int) -> Recipe:
    """The recipe under `options`."""
    return Recipe("sft", (expert_term(options.aggregation, max_new_tokens),))


def expert_term(aggregate: Aggregation, max_new_tokens: int, weight: float = 1.0) -> LossTerm:
    """The SFT term, with its own denominator over the expert experiences."""
    return LossTerm(
        "sft",
        lambda inputs: negative_log_likelihood(inputs.logprob),
        aggregation(aggregate, max_length=max_new_tokens),
        source=Source.EXPERT,
        weight=weight,
    )
