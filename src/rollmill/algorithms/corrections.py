"""Off-policy corrections: weights for tokens whose sampling distribution is not the policy the update starts from."""

from __future__ import annotations

import torch
from torch import Tensor


def truncated_importance(old_logprob: Tensor, rollout_logprob: Tensor, cap: float) -> Tensor:
    """min(pi_old / pi_rollout, cap), without gradient: token-level truncated importance sampling (TIS). [tokens].

    Multiplied with a clipped surrogate it is AReaL's decoupled PPO (arXiv:2505.24298). Truncation is biased.
    """
    return torch.exp((old_logprob - rollout_logprob).detach()).clamp(max=cap)
