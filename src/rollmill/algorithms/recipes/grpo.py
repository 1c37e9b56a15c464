"""GRPO (arXiv:2402.03300): A = (r - mean) / (std + eps) within a group, clipped surrogate, k3 KL penalty.

Loss: 1/N sum_i 1/T_i sum_t [-min(rho A, clip(rho) A) + kl * k3], N judged completions of the optimizer step.
"""

from __future__ import annotations

import rollmill.algorithms.advantages as advantages
from rollmill.algorithms.recipe import Advantages, Recipe, RewardInputs
from rollmill.algorithms.recipes.policy import judged, policy_terms
from rollmill.config.algorithm import GRPOOptions


def build(options: GRPOOptions, max_new_tokens: int) -> Recipe:
    """The recipe under `options`."""

    def advantage(inputs: RewardInputs) -> Advantages:
        values = advantages.grpo(inputs.rewards, inputs.groups, scale=options.scale, ddof=options.ddof)
        return judged(inputs, values)

    return Recipe(
        "grpo",
        policy_terms(options, max_new_tokens),
        advantage,
        importance_cap=options.importance_cap,
        clip_low=options.clip_low,
        clip_high=options.clip_high,
    )
