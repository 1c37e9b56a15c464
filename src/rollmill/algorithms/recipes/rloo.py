"""RLOO (arXiv:2402.14740): A_i = r_i minus the mean of the other rewards of the group; unbiased on policy."""

from __future__ import annotations

import rollmill.algorithms.advantages as advantages
from rollmill.algorithms.recipe import Advantages, Recipe, RewardInputs
from rollmill.algorithms.recipes.policy import judged, policy_terms
from rollmill.config.algorithm import RLOOOptions


def build(options: RLOOOptions, max_new_tokens: int) -> Recipe:
    """The recipe under `options`."""

    def advantage(inputs: RewardInputs) -> Advantages:
        return judged(inputs, advantages.rloo(inputs.rewards, inputs.groups))

    return Recipe(
        "rloo",
        policy_terms(options, max_new_tokens),
        advantage,
        importance_cap=options.importance_cap,
        clip_low=options.clip_low,
        clip_high=options.clip_high,
    )
