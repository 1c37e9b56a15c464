"""Losses: pure functions from log-probs to per-token terms [tokens], to be minimised.

Policy losses, the value loss of a critic, and losses on tokens of demonstrations. `logprob` carries the gradient;
`old_logprob` is the policy at the start of the update (proximal); both at the rollout temperature. Masks and
denominators are applied in `aggregation`.
"""

from __future__ import annotations

import math

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
    logprob: Tensor,
    old_logprob: Tensor,
    advantage: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> Tensor:
    """bool [tokens]: True where clipping removes the gradient.

    These are ratios beyond the bound on the advantage's side or, where A < 0, beyond `dual_clip`.
    """
    ratio = torch.exp(logprob - old_logprob)
    beyond = ((ratio > 1 + clip_high) & (advantage > 0)) | ((ratio < 1 - clip_low) & (advantage < 0))
    return beyond if dual_clip is None else beyond | ((ratio > dual_clip) & (advantage < 0))


def surrogate(logprob: Tensor, old_logprob: Tensor, advantage: Tensor) -> Tensor:
    """-rho A, without clipping: the importance-weighted policy gradient. [tokens].

    M2PO (arXiv:2510.01161, eq. 5) combines it with a mask over the whole step, `trust_region.second_moment`.
    """
    return -torch.exp(logprob - old_logprob) * advantage


def negative_log_likelihood(logprob: Tensor) -> Tensor:
    """-log p of demonstrated tokens: supervised fine-tuning. [tokens]."""
    return -logprob


def policy_gradient(logprob: Tensor, advantage: Tensor) -> Tensor:
    """-A log pi, without a ratio (REINFORCE, Williams 1992). [tokens].

    With sequence-sum-mean it is also AsymRE (arXiv:2506.20520), with its lower baseline. With token-mean it is GPG
    (arXiv:2504.02546), whose factor B / (B - M) comes from leaving uniform groups out of the denominator.
    """
    return -advantage * logprob


def raft(logprob: Tensor, advantage: Tensor) -> Tensor:
    """-log pi where the advantage is positive, else 0 (RAFT, arXiv:2304.06767, algorithm 1). [tokens].

    Supervised fine-tuning on the samples that `advantages.best_of_group` accepts. With token-mean over the accepted
    samples: the others are left out of the denominator, too. RAFT++ (arXiv:2504.11343) is `ppo_clip` with the same
    advantage.
    """
    return torch.where(advantage > 0, -logprob, 0)


def opmd(logprob: Tensor, advantage: Tensor, *, tau: float = 1.0) -> Tensor:
    """-A log pi / (1 + tau): online policy mirror descent as Trinity-RFT (arXiv:2505.17826) simplifies it. [tokens].

    A is r minus the group's mean. With token-mean, as in their code.
    """
    return -advantage * logprob / (1 + tau)


def cispo(
    logprob: Tensor, old_logprob: Tensor, advantage: Tensor, *, clip_low: float = 1.0, clip_high: float = 4.0
) -> Tensor:
    """-sg(clip(rho, 1 - clip_low, 1 + clip_high)) A log pi (CISPO, arXiv:2506.13585, eq. 4). [tokens].

    The weight is clipped, not the update: every token keeps a gradient. Published with token-mean, without a lower
    bound (`clip_low` 1) and without a value of the upper one. Default: a weight of at most 5, as in ScaleRL
    (arXiv:2510.13786).
    """
    weight = torch.exp((logprob - old_logprob).detach()).clamp(1 - clip_low, 1 + clip_high)
    return -weight * advantage * logprob


def sapo(
    logprob: Tensor, old_logprob: Tensor, advantage: Tensor, *, tau_positive: float = 1.0, tau_negative: float = 1.05
) -> Tensor:
    """-(4 / tau) sigmoid(tau (rho - 1)) A: a soft gate instead of clipping (SAPO, arXiv:2511.20347). [tokens].

    tau is `tau_positive` where A > 0, else `tau_negative`. The gradient is that of -rho A times 4 g (1 - g), g the
    sigmoid: a factor of 1 at rho = 1. Published with sequence-mean.
    """
    ratio = torch.exp(logprob - old_logprob)
    tau = torch.full_like(ratio, tau_negative).masked_fill(advantage > 0, tau_positive)
    return -4 / tau * torch.sigmoid(tau * (ratio - 1)) * advantage


def softmax_ppo(logprob: Tensor, old_logprob: Tensor, advantage: Tensor, *, clip: float = 0.3) -> Tensor:
    """-A log clip(rho, 1 / (1 + clip), 1 + clip) (sPPO, arXiv:2108.05828; Trinity-RFT's `sppo`). [tokens].

    No gradient outside the bounds, whatever the sign of A. With token-mean, as in Trinity-RFT.
    """
    bound = math.log1p(clip)
    return -advantage * (logprob - old_logprob).clamp(-bound, bound)


def value_loss(value: Tensor, old_value: Tensor, returns: Tensor, *, clip: float | None = 0.2) -> Tensor:
    """.5 max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2), as in PPO2 (baselines). [tokens].

    V_old is the value at the start of the update. `clip` None: .5 (V - R)^2. Published with token-mean.
    """
    error = (value - returns) ** 2
    if clip is not None:
        near = torch.clamp(value, old_value - clip, old_value + clip)
        error = torch.maximum(error, (near - returns) ** 2)
    return 0.5 * error


def importance_sft(logprob: Tensor) -> Tensor:
    """-sg(p) log p: imitation weighted by the ratio of policy to expert, where the expert's is 1. [tokens].

    CHORD's SFT with importance sampling (arXiv:2508.11408, eq. 4); also known as DFT (arXiv:2508.05629). Its
    gradient is that of -p. Published with token-mean over tokens of demonstrations.
    """
    return -logprob.detach().exp() * logprob


def chord_sft(logprob: Tensor, *, cutoff: float = 1.0) -> Tensor:
    """-sg(p (1 - p)) min(log p, log cutoff): low weight for tokens with a probability near 0 or 1. [tokens].

    CHORD-phi (arXiv:2508.11408), published with token-mean over tokens of demonstrations. A `cutoff` below 1 removes
    the gradient where p is above it, as in Trinity-RFT's `sft_phi`.
    """
    p = logprob.detach().exp()
    capped = logprob if cutoff == 1 else torch.clamp(logprob, max=math.log(cutoff))
    return -p * (1 - p) * capped


def chord_mu(step: int, *, warmup: int, decay: int, peak: float, valley: float) -> float:
    """Share mu of the supervised loss at a training step, counted from 0 (CHORD-mu, arXiv:2508.11408).

    Rises linearly from 0 to `peak` over `warmup` steps, then falls along half a cosine to `valley` over `decay` steps.
    """
    if step < warmup:
        return peak * step / warmup
    if step >= warmup + decay:
        return valley
    return valley + (peak - valley) * (1 + math.cos(math.pi * (step - warmup) / decay)) / 2
