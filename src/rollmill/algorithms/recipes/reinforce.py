"""REINFORCE (Williams 1992) with the batch's mean reward as baseline, or none; the ratio is clipped as in PPO."""

from __future__ import annotations

import rollmill.algorithms.advantages as advantages
from rollmill.algorithms.recipe import Advantages, Recipe, RewardInputs
from rollmill.algorithms.recipes.policy import judged, policy_terms
from rollmill.config.algorithm import ReinforceOptions


def build(options: ReinforceOptions, max_new_tokens: int) -> Recipe:
    """The recipe under `options`."""

    def advantage(inputs: RewardInputs) -> Advantages:
        return judged(inputs, advantages.reinforce(inputs.rewards, inputs.groups, baseline=options.baseline))

    return Recipe(
        "reinforce",
        policy_terms(options, max_new_tokens),
        advantage,
        importance_cap=options.importance_cap,
        clip_low=options.clip_low,
        clip_high=options.clip_high,
    )
