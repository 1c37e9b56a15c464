"""Policy losses of whole sequences: per-token terms [tokens], to be minimised, from each sequence's log-ratio.

`sequence` int64 [tokens] is the index of the token's sequence; `advantage` [tokens] is constant within a sequence
unless noted. `logprob` carries the gradient. A value per sequence is repeated on each of its tokens, so that
`sequence-mean` gives the mean over sequences.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rollmill.algorithms.aggregation import token_sequence_mean, token_sequence_sum
from rollmill.algorithms.losses import clipped, ppo_clip


def gspo(
    logprob: Tensor,
    old_logprob: Tensor,
    advantage: Tensor,
    sequence: Tensor,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> Tensor:
    """-min(s A, clip(s, 1 - clip_low, 1 + clip_high) A), s = exp(mean_t log rho_t) (GSPO, arXiv:2507.18071, eq. 5).

    [tokens]. The gradient of a sequence is -s A mean_t grad log pi_t. Published with sequence-mean.
    """
    log_ratio = token_sequence_mean(logprob - old_logprob, sequence)
    return ppo_clip(log_ratio, torch.zeros_like(log_ratio), advantage, clip_low=clip_low, clip_high=clip_high)


def gspo_token(
    logprob: Tensor,
    old_logprob: Tensor,
    advantage: Tensor,
    sequence: Tensor,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> Tensor:
    """GSPO with s_t = sg(s) pi / sg(pi), so that A may differ between a sequence's tokens (section 4.3). [tokens].

    Equal to `gspo` in value and gradient if A does not differ. Published with sequence-mean.
    """
    log_ratio = token_sequence_mean(logprob - old_logprob, sequence).detach() + logprob - logprob.detach()
    return ppo_clip(log_ratio, torch.zeros_like(log_ratio), advantage, clip_low=clip_low, clip_high=clip_high)


def gspo_clipped(
    logprob: Tensor,
    old_logprob: Tensor,
    advantage: Tensor,
    sequence: Tensor,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> Tensor:
    """bool [tokens]: True where GSPO's clipping removes the gradient, for all tokens of a sequence or none."""
    log_ratio = token_sequence_mean(logprob - old_logprob, sequence)
    return clipped(log_ratio, torch.zeros_like(log_ratio), advantage, clip_low=clip_low, clip_high=clip_high)


def gmpo(
    logprob: Tensor,
    old_logprob: Tensor,
    advantage: Tensor,
    sequence: Tensor,
    *,
    clip_low: float = 0.4,
    clip_high: float = 0.4,
) -> Tensor:
    """-A exp(mean_t c_t): the geometric mean of clipped ratios (GMPO, arXiv:2507.20673). [tokens].

    c_t = min(log rho_t, clip_high) where A > 0, else max(log rho_t, -clip_low): each token is clipped before the mean,
    in log space, where GSPO clips the mean. The gradient is -A exp(mean c) mean_t [not clipped] grad log pi_t. With
    sequence-mean.
    """
    log_ratio = logprob - old_logprob
    bounded = torch.where(advantage > 0, log_ratio.clamp(max=clip_high), log_ratio.clamp(min=-clip_low))
    return -advantage * token_sequence_mean(bounded, sequence).exp()


def gmpo_clipped(
    logprob: Tensor, old_logprob: Tensor, advantage: Tensor, *, clip_low: float = 0.4, clip_high: float = 0.4
) -> Tensor:
    """bool [tokens]: True where GMPO's clipping removes the token's gradient."""
    log_ratio = logprob - old_logprob
    return ((log_ratio > clip_high) & (advantage > 0)) | ((log_ratio < -clip_low) & (advantage < 0))


def vespo(
    logprob: Tensor,
    rollout_logprob: Tensor,
    advantage: Tensor,
    sequence: Tensor,
    *,
    k_positive: float = 2.0,
    lambda_positive: float = 3.0,
    k_negative: float = 3.0,
    lambda_negative: float = 2.0,
) -> Tensor:
    """-sg(phi(W)) A log pi, phi(W) = W^k exp(lambda (1 - W)), W = prod_t pi / pi_rollout. [tokens].

    VESPO (arXiv:2602.10693, section 3.4). phi is 1 at W = 1 and falls to 0 on both sides; k and lambda depend on the
    sign of A (0 counts as positive). Defaults and token-mean as in the authors' code. W is relative to the policy that
    sampled, whatever the old policy is.
    """
    log_weight = token_sequence_sum((logprob - rollout_logprob).detach(), sequence)
    negative = advantage < 0
    k = torch.where(negative, k_negative, k_positive)
    lam = torch.where(negative, lambda_negative, lambda_positive)
    return -torch.exp(lam + k * log_weight - lam * log_weight.exp()) * advantage * logprob


def topr(logprob: Tensor, old_logprob: Tensor, advantage: Tensor, sequence: Tensor) -> Tensor:
    """-w A log pi; w = 1 where A >= 0, else sg(min(prod_t rho_t, 1)) (TOPR, arXiv:2503.14286). [tokens].

    `old_logprob` is of the policy that sampled. Published with sequence-sum-mean.
    """
    taper = torch.exp(token_sequence_sum((logprob - old_logprob).detach(), sequence)).clamp(max=1)
    return -torch.where(advantage < 0, taper, 1) * advantage * logprob


def kimi_mirror(
    logprob: Tensor, old_logprob: Tensor, advantage: Tensor, sequence: Tensor, *, tau: float = 0.1
) -> Tensor:
    """(A - tau sum_t log rho_t)^2 (Kimi k1.5's mirror descent, arXiv:2501.12599, section 2.3.2). [tokens].

    A is r minus the group's mean, which approximates tau log Z. The gradient is -2 tau times the published one,
    A grad log pi(y) - (tau / 2) grad log^2 rho(y). With sequence-mean. The paper gives no value of `tau`. The term is
    not 0 where A = 0.
    """
    return (advantage - tau * token_sequence_sum(logprob - old_logprob, sequence)) ** 2


def sppo(logprob: Tensor, old_logprob: Tensor, advantage: Tensor, sequence: Tensor, *, beta: float = 1e-3) -> Tensor:
    """(sum_t log rho_t - A / beta)^2 (self-play preference optimisation, arXiv:2405.00675). [tokens].

    A is the estimated chance of winning against the old policy, minus 1/2; 1 / beta is the paper's eta. With
    sequence-mean. The term is not 0 where A = 0.
    """
    return (token_sequence_sum(logprob - old_logprob, sequence) - advantage / beta) ** 2
