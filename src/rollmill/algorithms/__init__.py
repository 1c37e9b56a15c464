"""Algorithms as pure tensor functions, under the names used in run files, and recipes that combine them."""

from rollmill.algorithms.advantages import (
    grpo,
    mean_baseline,
    overlong_penalty,
    reinforce,
    rloo,
    uniform_groups,
)
from rollmill.algorithms.aggregation import constant, sequence_mean, sequence_sum_mean, token_mean
from rollmill.algorithms.build import build_recipe
from rollmill.algorithms.corrections import truncated_importance
from rollmill.algorithms.kl import k1, k2, k3
from rollmill.algorithms.losses import clipped, negative_log_likelihood, ppo_clip
from rollmill.algorithms.recipe import Advantages, LossTerm, Recipe, RewardInputs, TermInputs

dr_grpo = mean_baseline
dapo = grpo
sft = negative_log_likelihood

__all__ = [
    "Advantages",
    "LossTerm",
    "Recipe",
    "RewardInputs",
    "TermInputs",
    "build_recipe",
    "clipped",
    "constant",
    "dapo",
    "dr_grpo",
    "grpo",
    "k1",
    "k2",
    "k3",
    "mean_baseline",
    "negative_log_likelihood",
    "overlong_penalty",
    "ppo_clip",
    "reinforce",
    "rloo",
    "sequence_mean",
    "sequence_sum_mean",
    "sft",
    "token_mean",
    "truncated_importance",
    "uniform_groups",
]
