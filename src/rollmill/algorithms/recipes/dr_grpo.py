"""Dr. GRPO (arXiv:2503.20783): A = r - mean(r), no length normalisation.

Loss: sum of all token terms / (max_new_tokens * N): a constant, whatever the completions' lengths or the padding.
"""

from __future__ import annotations

import rollmill.algorithms.advantages as advantages
from rollmill.algorithms.recipe import Advantages, Recipe, RewardInputs
from rollmill.algorithms.recipes.policy import judged, policy_terms
from rollmill.config.algorithm import DrGRPOOptions


def build(options: DrGRPOOptions, max_new_tokens: int) -> Recipe:
    """The recipe under `options`."""

    def advantage(inputs: RewardInputs) -> Advantages:
        return judged(inputs, advantages.mean_baseline(inputs.rewards, inputs.groups))

    return Recipe(
        "dr_grpo",
        policy_terms(options, max_new_tokens),
        advantage,
        importance_cap=options.importance_cap,
        clip_low=options.clip_low,
        clip_high=options.clip_high,
    )
