"""One short file per algorithm: formula, source, and how its options become a recipe."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rollmill.algorithms.recipe import Recipe
from rollmill.algorithms.recipes import dapo, dr_grpo, grpo, mix, reinforce, rloo, sft
from rollmill.config.algorithm import (
    AlgorithmOptions,
    DAPOOptions,
    DrGRPOOptions,
    GRPOOptions,
    MIXOptions,
    ReinforceOptions,
    RLOOOptions,
    SFTOptions,
)

_BUILDERS: dict[type[AlgorithmOptions], Callable[[Any, int], Recipe]] = {
    GRPOOptions: grpo.build,
    DrGRPOOptions: dr_grpo.build,
    DAPOOptions: dapo.build,
    ReinforceOptions: reinforce.build,
    RLOOOptions: rloo.build,
    SFTOptions: sft.build,
    MIXOptions: mix.build,
}


def build_recipe(options: AlgorithmOptions, *, max_new_tokens: int) -> Recipe:
    """Turn the `algorithm` section of a run file into a recipe.

    Args:
        options: the section, as one of the models of `rollmill.config.algorithm`.
        max_new_tokens: longest completion a rollout may have; Dr. GRPO's constant and DAPO's overlong penalty use it.
    """
    return _BUILDERS[type(options)](options, max_new_tokens)
