"""Entropy control: token masks, a penalty on selected tokens, and an adaptive entropy bonus.

Masks are pure functions of all rollout tokens with a reward of one optimizer step, [n] each, without gradient, so they
do not depend on the split into micro-batches. They return bool [n]: True where the policy loss keeps the token. A
masked token still counts in the denominator. `logprob` and `entropy` are of the policy just before the update.
"""

from __future__ import annotations

import torch
from torch import Tensor

TIE_TOLERANCE = 1e-5  #: nats; closer entropies are considered equal


def high_entropy(entropy: Tensor, *, top: float = 0.2) -> Tensor:
    """Keeps the share `top` of the tokens with the highest entropy (arXiv:2506.01939, the 80/20 rule). bool [n].

    The threshold is the (1 - top) quantile of the step, as in TRL. Tokens within rounding of the threshold are kept:
    the first tokens of a group have the same entropy and would otherwise be split by chance.
    """
    return entropy >= torch.quantile(entropy.double(), 1 - top) - TIE_TOLERANCE if len(entropy) else entropy > 0


def discriminant(logprob: Tensor, entropy: Tensor) -> Tensor:
    """S = p (H + log p) (arXiv:2602.03392, theorem 3.2): raising the token's logit by e changes H by -e S. [n]."""
    return logprob.exp() * (entropy + logprob)


def clip_b(logprob: Tensor, entropy: Tensor, advantage: Tensor, *, mu: float = 2.5) -> Tensor:
    """Masks tokens with A < 0 whose S lies more than `mu` standard deviations below the step's mean. bool [n].

    Clip_B (arXiv:2602.03392), one-sided as in Trinity-RFT: penalising these tokens would lower the entropy most.
    """
    s = discriminant(logprob, entropy).double()
    return ~((advantage < 0) & (s - s.mean() < -mu * s.std(correction=0)))


def clip_v(
    logprob: Tensor,
    entropy: Tensor,
    expected_discriminant: Tensor,
    advantage: Tensor,
    *,
    mu: float = 8.5,
    max_share: float = 1e-4,
) -> Tensor:
    """Masks tokens with A < 0 for which D = E_v[S_v] - S exceeds `mu` standard deviations of D. bool [n].

    Clip_V (arXiv:2602.03392), one-sided and bounded as in Trinity-RFT. E_v is the policy's expectation over the
    vocabulary.

    Args:
        expected_discriminant: sum_v p_v^2 (H + log p_v), [n].
        max_share: at most this share of the step's tokens is masked (but always up to one): the greatest D.
    """
    d = (expected_discriminant - discriminant(logprob, entropy)).double()
    beyond = (advantage < 0) & (d > mu * d.std(correction=0))
    room = max(int(max_share * len(d)), 1)
    if int(beyond.sum()) > room:
        greatest = d.masked_fill(~beyond, -torch.inf).topk(room).indices
        beyond = torch.zeros_like(beyond).index_fill_(0, greatest, True)
    return ~beyond


def covariance(logprob: Tensor, advantage: Tensor) -> Tensor:
    """(log pi - mean) (A - mean), means over the step (arXiv:2505.22617, section 4.2). float64 [n]."""
    lp, a = logprob.double(), advantage.double()
    return (lp - lp.mean()) * (a - a.mean())


def clip_cov(
    logprob: Tensor,
    advantage: Tensor,
    dropped: Tensor,
    draw: Tensor,
    *,
    share: float = 2e-4,
    low: float = 1.0,
    high: float = 5.0,
) -> Tensor:
    """Masks a few tokens chosen at random among those whose covariance is in (low, high). bool [n].

    Clip-Cov (arXiv:2505.22617, section 4.2; bounds as in verl). These tokens lower the entropy.

    Args:
        dropped: bool [n], tokens that the loss clips anyway; they are not chosen.
        draw: [n], random numbers; the smallest are chosen.
        share: share of the step's tokens to mask; at least one if there is a candidate.
    """
    cov = covariance(logprob, advantage)
    candidate = (cov > low) & (cov < high) & ~dropped
    count = min(max(int(share * len(cov)), 1), int(candidate.sum()))
    chosen = draw.masked_fill(~candidate, torch.inf).topk(count, largest=False).indices
    return torch.ones_like(candidate).index_fill_(0, chosen, False)


def largest_covariance(logprob: Tensor, advantage: Tensor, *, share: float = 2e-4) -> Tensor:
    """Selects the share of the step's tokens with the largest covariance, at least one. bool [n].

    KL-Cov (arXiv:2505.22617, section 4.2) penalises them, see `kl_cov`.
    """
    cov = covariance(logprob, advantage)
    count = min(max(int(share * len(cov)), 1), len(cov))
    return torch.zeros_like(cov, dtype=torch.bool).index_fill_(0, cov.topk(count).indices, True)


def kl_cov(
    logprob: Tensor, old_logprob: Tensor, advantage: Tensor, selected: Tensor, *, coefficient: float = 1.0
) -> Tensor:
    """-rho A, plus coefficient |log rho| on the selected tokens (KL-Cov, arXiv:2505.22617, section 4.2).

    [tokens]. `selected` is the result of `largest_covariance`. With token-mean. In a first update rho is 1, so the
    penalty needs several updates per batch, or stale tokens. The term is not 0 where A = 0.
    """
    log_ratio = logprob - old_logprob
    return -log_ratio.exp() * advantage + coefficient * torch.where(selected, log_ratio.abs(), 0)


class AdaptiveEntropy:
    """Entropy bonus coefficient that follows a target (Skywork-OR1, arXiv:2505.22312, adaptive entropy control).

    After each step the coefficient rises by `delta` if the entropy is at most the target, otherwise it falls by
    `delta`. The bonus is active only while the entropy is at most the target. The entropy is that of the previous step,
    as in TRL, which saves a forward pass; the first step uses the initial coefficient.

    Args:
        coefficient: initial coefficient.
        target: mean entropy per token, in nats.
        maximum: upper bound of the coefficient; the lower bound is 0.
    """

    def __init__(self, coefficient: float, *, target: float, delta: float, maximum: float) -> None:
        self.coefficient, self.active = coefficient, True
        self.target, self.delta, self.maximum = target, delta, maximum

    @property
    def weight(self) -> float:
        """Current weight of the bonus."""
        return self.coefficient if self.active else 0.0

    def update(self, entropy: float) -> None:
        """Updates the coefficient after a step with this mean entropy."""
        self.active = entropy <= self.target
        moved = self.coefficient + (self.delta if self.active else -self.delta)
        self.coefficient = min(max(moved, 0.0), self.maximum)

    def state_dict(self) -> dict[str, float]:
        """Returns the state for a checkpoint; the target is part of the configuration."""
        return {"coefficient": self.coefficient, "active": float(self.active)}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.coefficient, self.active = state["coefficient"], bool(state["active"])
