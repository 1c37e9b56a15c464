"""Algorithms as pure tensor functions, named as in run files, and recipes that combine them.

`opmd` here is the advantage of that name; the loss is `losses.opmd`.
"""

from rollmill.algorithms.advantages import (
    asymre,
    best_of_group,
    gdpo,
    grpo,
    mean_baseline,
    opmd,
    opo,
    overlong_penalty,
    pass_at_k,
    reinforce,
    remax,
    rloo,
    uniform_groups,
    whiten,
)
from rollmill.algorithms.aggregation import constant, sequence_mean, sequence_sum_mean, token_mean
from rollmill.algorithms.corrections import truncated_importance
from rollmill.algorithms.entropy import clip_b, clip_cov, clip_v, high_entropy, kl_cov
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
    surrogate,
)
from rollmill.algorithms.policy_recipes import build_recipe
from rollmill.algorithms.preference import bradley_terry, dpo, ipo
from rollmill.algorithms.recipe import (
    AdvantageInputs,
    AdvantageResult,
    LossInputs,
    LossTerm,
    MaskInputs,
    Recipe,
    TokenAdvantageInputs,
)
from rollmill.algorithms.sequence_losses import gmpo, gspo, gspo_token, kimi_mirror, sppo, topr, vespo
from rollmill.algorithms.token_advantages import gae, gigpo, optimal_token_baseline, reinforce_plus_plus, stepwise
from rollmill.algorithms.trust_region import dppo_tv, rec, second_moment

dr_grpo = mean_baseline
dapo = grpo
sft = negative_log_likelihood

__all__ = [
    "AdvantageInputs",
    "AdvantageResult",
    "LossInputs",
    "LossTerm",
    "MaskInputs",
    "Recipe",
    "TokenAdvantageInputs",
    "asymre",
    "best_of_group",
    "bradley_terry",
    "build_recipe",
    "cispo",
    "clip_b",
    "clip_cov",
    "clip_v",
    "clipped",
    "constant",
    "dapo",
    "dpo",
    "dppo_tv",
    "dr_grpo",
    "gae",
    "gdpo",
    "gigpo",
    "gmpo",
    "grpo",
    "gspo",
    "gspo_token",
    "high_entropy",
    "ipo",
    "k1",
    "k2",
    "k3",
    "kimi_mirror",
    "kl_cov",
    "mean_baseline",
    "negative_log_likelihood",
    "opmd",
    "opo",
    "optimal_token_baseline",
    "overlong_penalty",
    "pass_at_k",
    "policy_gradient",
    "ppo_clip",
    "raft",
    "rec",
    "reinforce",
    "reinforce_plus_plus",
    "remax",
    "rloo",
    "sapo",
    "second_moment",
    "sequence_mean",
    "sequence_sum_mean",
    "sft",
    "softmax_ppo",
    "sppo",
    "stepwise",
    "surrogate",
    "token_mean",
    "topr",
    "truncated_importance",
    "unbiased",
    "uniform_groups",
    "vespo",
    "whiten",
]
