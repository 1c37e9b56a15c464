"""Policy losses that drop tokens outside a trust region: per-token terms [tokens], to be minimised.

Each has a function that returns the dropped tokens, for metrics.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from rollmill.algorithms.losses import clipped

RecClip = Literal["one-side", "two-side", "ring"]


def rec(
    logprob: Tensor,
    old_logprob: Tensor,
    advantage: Tensor,
    *,
    clip: RecClip = "one-side",
    importance: bool = False,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    far_low: float = 0.6,
    far_high: float = 2.0,
) -> Tensor:
    """-m w A log pi: the REC family of group-relative REINFORCE (arXiv:2509.24203). [tokens].

    m is 0 where `rec_clipped`. REC-OneSide-IS has PPO's gradient. With token-mean and A = r - mean.

    Args:
        clip: see `rec_clipped`.
        importance: w = sg(rho) (the variants called IS) or 1 (NoIS).
    """
    dropped = rec_clipped(
        logprob,
        old_logprob,
        advantage,
        clip=clip,
        clip_low=clip_low,
        clip_high=clip_high,
        far_low=far_low,
        far_high=far_high,
    )
    weight = torch.exp((logprob - old_logprob).detach()) if importance else 1.0
    return torch.where(dropped, 0, -weight * advantage * logprob)


def rec_clipped(
    logprob: Tensor,
    old_logprob: Tensor,
    advantage: Tensor,
    *,
    clip: RecClip = "one-side",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    far_low: float = 0.6,
    far_high: float = 2.0,
) -> Tensor:
    """bool [tokens]: tokens that a member of the REC family drops.

    Args:
        clip: "one-side": PPO's rule, rho beyond the bound on A's side. "two-side": rho outside the bounds. "ring":
            rho outside the bounds, except far off on the side that A corrects (A > 0 and rho <= 1 - far_low, or
            A < 0 and rho >= 1 + far_high).
    """
    if clip == "one-side":
        return clipped(logprob, old_logprob, advantage, clip_low=clip_low, clip_high=clip_high)
    ratio = torch.exp((logprob - old_logprob).detach())
    outside = (ratio < 1 - clip_low) | (ratio > 1 + clip_high)
    if clip == "two-side":
        return outside
    corrected = ((advantage > 0) & (ratio <= 1 - far_low)) | ((advantage < 0) & (ratio >= 1 + far_high))
    return outside & ~corrected


def dppo_tv(
    logprob: Tensor,
    rollout_logprob: Tensor,
    advantage: Tensor,
    *,
    bound_low: float = 0.2,
    bound_high: float = 0.2,
    kl: float = 1e-3,
) -> Tensor:
    """-k A rho + kl (log rho)^2, rho = pi / pi_rollout; k is 0 where `dppo_masked`. [tokens].

    DPPO-Binary-TV (arXiv:2602.04879; the squared log-ratio as in arXiv:2602.02276). The default loss of prime-rl, with
    token-mean and A = r - mean. The term is not 0 where A = 0.
    """
    log_ratio = logprob - rollout_logprob
    dropped = dppo_masked(logprob, rollout_logprob, advantage, bound_low=bound_low, bound_high=bound_high)
    return -torch.where(dropped, 0, advantage * torch.exp(log_ratio)) + kl * log_ratio**2


def dppo_masked(
    logprob: Tensor, rollout_logprob: Tensor, advantage: Tensor, *, bound_low: float = 0.2, bound_high: float = 0.2
) -> Tensor:
    """bool [tokens]: True where the token's probability has already moved too far in the direction of A.

    A > 0 and pi - pi_rollout > bound_high, or A <= 0 and pi - pi_rollout < -bound_low.
    """
    moved = (logprob.exp() - rollout_logprob.exp()).detach()
    return torch.where(advantage > 0, moved > bound_high, moved < -bound_low)


def second_moment(logprob: Tensor, old_logprob: Tensor, advantage: Tensor, *, threshold: float = 0.04) -> Tensor:
    """bool [n]: tokens of a whole optimizer step that M2PO keeps (arXiv:2510.01161, algorithm 1).

    Tokens that the update pushes further away (A > 0 and rho > 1, or A < 0 and rho < 1) are dropped, the greatest
    (log rho)^2 first, until the mean of (log rho)^2 over the rest of them is at most `threshold`. Other tokens are
    always kept. A dropped token still counts in the denominator (footnote 2).
    """
    log_ratio = (logprob - old_logprob).double()
    pushed = ((advantage > 0) & (log_ratio > 0)) | ((advantage < 0) & (log_ratio < 0))
    index = pushed.nonzero()[:, 0]
    squares, order = (log_ratio[index] ** 2).sort(stable=True)
    means = squares.cumsum(0) / torch.arange(1, len(squares) + 1, device=squares.device)
    kept = torch.ones_like(pushed)
    kept[index[order[int((means <= threshold).sum()) :]]] = False
    return kept
