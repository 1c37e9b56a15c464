"""Policy losses: pure functions from log-probs to per-token terms [tokens], to be minimised.

`logprob` carries the gradient; `old_logprob` is the policy at the start of the update (proximal); both at the rollout
temperature. Masks and denominators are not their business: see `aggregation`.
"""

from __future__ import annotations

import torch
from torch import Tensor


def ppo_clip(
    logprob: Tensor,
    old_logprob: Tensor,
    advantage: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> Tensor:
    """-min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A), rho = exp(logprob - old_logprob) (PPO, arXiv:1707.06347).

    `dual_clip` c bounds the objective of negative advantages: max(.., c A) (arXiv:1912.09729). [tokens] in and out.
    """
    ratio = torch.exp(logprob - old_logprob)
    objective = torch.minimum(ratio * advantage, ratio.clamp(1 - clip_low, 1 + clip_high) * advantage)
    if dual_clip is not None:
        objective = torch.where(advantage < 0, torch.maximum(objective, dual_clip * advantage), objective)
    return -objective


def clipped(
    logprob: Tensor, old_logprob: Tensor, advantage: Tensor, *, clip_low: float = 0.2, clip_high: float = 0.2
) -> Tensor:
    """bool [tokens]: where clipping takes the gradient away (ratio beyond the bound on the advantage's side)."""
    ratio = torch.exp(logprob - old_logprob)
    return ((ratio > 1 + clip_high) & (advantage > 0)) | ((ratio < 1 - clip_low) & (advantage < 0))


def negative_log_likelihood(logprob: Tensor) -> Tensor:
    """-log p of demonstrated tokens: supervised fine-tuning. [tokens]."""
    return -logprob
