"""Algorithms as pure tensor functions, and recipes that combine them.

A name of a run file is a function of one of the modules: `implementation` of its section says which one.
"""

from rollmill.algorithms.policy_recipes import build_recipe
from rollmill.algorithms.recipe import (
    AdvantageInputs,
    AdvantageResult,
    LossInputs,
    LossTerm,
    MaskInputs,
    Recipe,
    TokenAdvantageInputs,
)

__all__ = [
    "AdvantageInputs",
    "AdvantageResult",
    "LossInputs",
    "LossTerm",
    "MaskInputs",
    "Recipe",
    "TokenAdvantageInputs",
    "build_recipe",
]
