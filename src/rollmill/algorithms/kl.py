"""KL estimators from samples of the policy pi, x = reference / pi (Schulman, "Approximating KL divergence").

As a loss (gradient through pi, on-policy) k1's gradient is 0 in expectation, k2's is that of KL(pi || ref) and k3's
that of KL(ref || pi).
"""

from __future__ import annotations

import torch
from torch import Tensor


def k1(logprob: Tensor, reference_logprob: Tensor) -> Tensor:
    """-log x: unbiased, may be negative. [tokens]."""
    return logprob - reference_logprob


def k2(logprob: Tensor, reference_logprob: Tensor) -> Tensor:
    """log(x)^2 / 2: biased, never negative. [tokens]."""
    return 0.5 * (reference_logprob - logprob) ** 2


def k3(logprob: Tensor, reference_logprob: Tensor) -> Tensor:
    """x - 1 - log x: unbiased, never negative; exactly 0 where the two are equal. [tokens]."""
    log_x = reference_logprob - logprob
    return torch.expm1(log_x) - log_x
