"""Algorithms as pure tensor functions, under the names used in run files, and recipes that combine them.

`opmd` is the advantage of that name; the loss is `losses.opmd`.
"""

from rollmill.algorithms.advantages import (
    asymre,
    gdpo,
    grpo,
    mean_baseline,
    opmd,
    overlong_penalty,
    reinforce,
    remax,
    rloo,
    uniform_groups,
    whiten,
)
from rollmill.algorithms.aggregation import constant, sequence_mean, sequence_sum_mean, token_mean
from rollmill.algorithms.build import build_recipe
from rollmill.algorithms.corrections import truncated_importance
from rollmill.algorithms.kl import k1, k2, k3, unbiased
from rollmill.algorithms.losses import (
    cispo,
    clipped,
    negative_log_likelihood,
    policy_gradient,
    ppo_clip,
    raft,
    sapo,
    softmax_ppo,
)
from rollmill.algorithms.preference import bradley_terry, dpo, ipo
from rollmill.algorithms.recipe import Advantages, LossTerm, Recipe, RewardInputs, TermInputs
from rollmill.algorithms.sequence_losses import gspo, gspo_token, kimi_mirror, sppo, topr
from rollmill.algorithms.token_advantages import gae, gigpo, reinforce_plus_plus, stepwise
from rollmill.algorithms.trust_region import dppo_tv, rec

dr_grpo = mean_baseline
dapo = grpo
sft = negative_log_likelihood

__all__ = [
    "Advantages",
    "LossTerm",
    "Recipe",
    "RewardInputs",
    "TermInputs",
    "asymre",
    "bradley_terry",
    "build_recipe",
    "cispo",
    "clipped",
    "constant",
    "dapo",
    "dpo",
    "dppo_tv",
    "dr_grpo",
    "gae",
    "gdpo",
    "gigpo",
    "grpo",
    "gspo",
    "gspo_token",
    "ipo",
    "k1",
    "k2",
    "k3",
    "kimi_mirror",
    "mean_baseline",
    "negative_log_likelihood",
    "opmd",
    "overlong_penalty",
    "policy_gradient",
    "ppo_clip",
    "raft",
    "rec",
    "reinforce",
    "reinforce_plus_plus",
    "remax",
    "rloo",
    "sapo",
    "sequence_mean",
    "sequence_sum_mean",
    "sft",
    "softmax_ppo",
    "sppo",
    "stepwise",
    "token_mean",
    "topr",
    "truncated_importance",
    "unbiased",
    "uniform_groups",
    "whiten",
]
