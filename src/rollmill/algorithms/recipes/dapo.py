"""DAPO (arXiv:2503.14476): GRPO's advantage, clip bounds .2/.28, token mean, overlong penalty.

The penalty is added to the reward before advantages are taken. Groups whose (penalised) rewards are all equal are left
out of the denominator: the part of dynamic sampling that needs no new rollouts.
"""

from __future__ import annotations

import rollmill.algorithms.advantages as advantages
from rollmill.algorithms.recipe import Advantages, Recipe, RewardInputs
from rollmill.algorithms.recipes.policy import judged, policy_terms
from rollmill.config.algorithm import DAPOOptions


def build(options: DAPOOptions, max_new_tokens: int) -> Recipe:
    """The recipe under `options`."""

    def advantage(inputs: RewardInputs) -> Advantages:
        rewards = inputs.rewards
        if options.overlong_buffer:
            rewards = rewards + advantages.overlong_penalty(inputs.lengths, max_new_tokens, options.overlong_buffer)
        result = judged(inputs, advantages.grpo(rewards, inputs.groups, ddof=options.ddof))
        if not options.drop_uniform_groups:
            return result
        return result._replace(counted=result.counted & ~advantages.uniform_groups(rewards, inputs.groups))

    return Recipe(
        "dapo",
        policy_terms(options, max_new_tokens),
        advantage,
        importance_cap=options.importance_cap,
        clip_low=options.clip_low,
        clip_high=options.clip_high,
    )
