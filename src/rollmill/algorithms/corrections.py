"""Off-policy corrections: weights for tokens that another policy sampled than the one the update starts from.

All weights are [tokens], carry no gradient and multiply a policy loss. `old_logprob` is of the policy the update starts
from (proximal), `rollout_logprob` as recorded by the rollout engine; x = pi_old / pi_rollout. `sequence` int64 [tokens]
is the index of the token's sequence. Bounds are inclusive. A weight of 0 does not change the denominator.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from rollmill.algorithms.aggregation import token_sequence_mean, token_sequence_sum
from rollmill.algorithms.kl import k3


def truncated_importance(old_logprob: Tensor, rollout_logprob: Tensor, cap: float) -> Tensor:
    """min(pi_old / pi_rollout, cap), without gradient: token-level truncated importance sampling (TIS). [tokens].

    Multiplied with a clipped surrogate it is AReaL's decoupled PPO (arXiv:2505.24298). Truncation is biased.
    """
    return torch.exp((old_logprob - rollout_logprob).detach()).clamp(max=cap)


def sequence_truncated_importance(old_logprob: Tensor, rollout_logprob: Tensor, sequence: Tensor, cap: float) -> Tensor:
    """min(prod_t x_t, cap) on every token of the sequence: sequence-level TIS. [tokens].

    With an infinite `cap` the policy gradient is unbiased; with token-level weights it never is.
    """
    return torch.exp(token_sequence_sum((old_logprob - rollout_logprob).detach(), sequence)).clamp(max=cap)


def masked_importance(old_logprob: Tensor, rollout_logprob: Tensor, *, low: float = 0.5, high: float = 5.0) -> Tensor:
    """x where low <= x <= high, else 0: IcePop (arXiv:2510.18855), masked importance sampling (MIS). [tokens]."""
    return _inside(torch.exp((old_logprob - rollout_logprob).detach()), low, high)


def sequence_masked_importance(
    old_logprob: Tensor, rollout_logprob: Tensor, sequence: Tensor, *, low: float = 0.5, high: float = 5.0
) -> Tensor:
    """prod_t x_t on every token of the sequence where it is in [low, high], else 0: sequence-level MIS. [tokens]."""
    return _inside(torch.exp(token_sequence_sum((old_logprob - rollout_logprob).detach(), sequence)), low, high)


def geometric_rejection(
    old_logprob: Tensor, rollout_logprob: Tensor, sequence: Tensor, *, low: float = 0.999, high: float = 1.001
) -> Tensor:
    """1 where low <= exp(mean_t log x_t) <= high, else 0, per sequence (Geo-RS; defaults as in verl). [tokens]."""
    ratio = torch.exp(token_sequence_mean((old_logprob - rollout_logprob).detach(), sequence))
    return ((ratio >= low) & (ratio <= high)).to(ratio.dtype)


def k3_rejection(old_logprob: Tensor, rollout_logprob: Tensor, sequence: Tensor, *, bound: float = 0.01) -> Tensor:
    """1 where mean_t (x_t - 1 - log x_t) <= bound, else 0, per sequence (default as in verl). [tokens].

    The mean estimates KL(pi_rollout || pi_old) per token. Unlike the geometric mean it does not cancel between tokens.
    """
    divergence = token_sequence_mean(k3(rollout_logprob, old_logprob).detach(), sequence)
    return (divergence <= bound).to(divergence.dtype)


def off_policy_sequence_mask(
    logprob: Tensor, rollout_logprob: Tensor, advantage: Tensor, sequence: Tensor, *, delta: float = 0.1
) -> Tensor:
    """0 where A < 0 and mean_t (log pi_rollout - log pi) > delta, else 1, per sequence. [tokens].

    DeepSeek-V3.2 (arXiv:2512.02556, section 3.1), which gives no value of `delta`. `logprob` is of the policy being
    trained.
    """
    distance = token_sequence_mean((rollout_logprob - logprob).detach(), sequence)
    return (~((advantage < 0) & (distance > delta))).to(distance.dtype)


def decoupled_importance(
    old_logprob: Tensor, rollout_logprob: Tensor, *, cap: float = 5.0, beyond: Literal["mask", "cap"] = "mask"
) -> Tensor:
    """pi_proximal / pi_rollout, for decoupled PPO (AReaL, arXiv:2505.24298; defaults as in its code). [tokens].

    Multiplies `ppo_clip(logprob, old_logprob, ...)`, where the old policy is the proximal one. Where the two policies
    are equal the weight is 1, which is PPO.

    Args:
        beyond: weights above `cap` become 0 ("mask") or `cap` ("cap").
    """
    if beyond == "mask":
        return masked_importance(old_logprob, rollout_logprob, low=0.0, high=cap)
    return truncated_importance(old_logprob, rollout_logprob, cap)


def interpolated_proximal(logprob: Tensor, rollout_logprob: Tensor, staleness: Tensor) -> Tensor:
    """log pi_rollout + alpha (log pi - log pi_rollout), alpha = d / (d + 1), without gradient. [tokens].

    AReaL's log-linear approximation of proximal log-probs, which saves a forward pass.

    Args:
        logprob: of the policy being trained, one version newer than the proximal one.
        staleness: d [tokens], 0 or more: updates between the version that sampled the token and the proximal one. alpha
            is the position of the proximal version between the sampling version and the trained one; with d = 0 a token
            keeps its rollout log-prob.
    """
    d = staleness.to(logprob.dtype)
    return torch.lerp(rollout_logprob.to(logprob.dtype), logprob, d / (d + 1)).detach()


def _inside(ratio: Tensor, low: float, high: float) -> Tensor:
    return torch.where((ratio >= low) & (ratio <= high), ratio, 0)
