"""KL estimators, an adaptive KL coefficient, and divergences for distillation.

Estimators use samples of the policy pi, x = reference / pi (Schulman, "Approximating KL divergence"). As a loss
(gradient through pi, on-policy) k1's gradient is 0 in expectation, k2's is that of KL(pi || ref) and k3's that of
KL(ref || pi). `unbiased` has the value of KL(pi || ref) and its gradient, also off-policy.

Distillation compares the student with a teacher on the student's own tokens. Shapes: R rows (positions), V vocabulary.
Log-probs over the vocabulary are finite and at temperature 1; `temperature` divides both. The student's carry the
gradient. Divergences are [rows], in nats, without the factor temperature^2. Published with token-mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

KLEstimator = Literal["k1", "k2", "k3", "abs", "unbiased"]


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


def absolute(logprob: Tensor, reference_logprob: Tensor) -> Tensor:
    """|log x|: biased, never negative; grows only linearly. [tokens]."""
    return (logprob - reference_logprob).abs()


def unbiased(logprob: Tensor, reference_logprob: Tensor, old_logprob: Tensor) -> Tensor:
    """(pi / pi_old) k3, for samples of pi_old (DeepSeek-V3.2, arXiv:2512.02556, eq. 7). [tokens].

    The ratio is differentiated, so value and gradient are unbiased for KL(pi || ref). On-policy the ratio is 1.
    """
    return torch.exp(logprob - old_logprob.detach()) * k3(logprob, reference_logprob)


_ESTIMATORS: dict[KLEstimator, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "k1": lambda logprob, reference, old: k1(logprob, reference),
    "k2": lambda logprob, reference, old: k2(logprob, reference),
    "k3": lambda logprob, reference, old: k3(logprob, reference),
    "abs": lambda logprob, reference, old: absolute(logprob, reference),
    "unbiased": unbiased,
}


def get_kl_estimator(name: KLEstimator) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Returns the estimator of this name: (logprob, reference_logprob, old_logprob) -> [tokens]."""
    return _ESTIMATORS[name]


class AdaptiveKL:
    """A KL coefficient that follows a target (Ziegler et al. 2019, arXiv:1909.08593, section 2.2).

    Each update multiplies it by 1 + e min(n / horizon, 1), where e is the relative error KL / target - 1 clipped to
    +-max_error. The bound on n / horizon keeps the coefficient positive for any batch size.

    Args:
        coefficient: initial coefficient.
        target: target KL in nats, per token or per sequence like the KL passed to `update`; above 0.
        horizon: samples over which an error of e changes the coefficient by about a factor of exp(e).
        max_error: relative errors are clipped to this; below 1.
    """

    def __init__(self, coefficient: float, *, target: float, horizon: float, max_error: float = 0.2) -> None:
        self.coefficient = coefficient
        self.target = target
        self.horizon = horizon
        self.max_error = max_error

    def update(self, kl: float, samples: int) -> float:
        """Returns the new coefficient, after a batch of `samples` completions with mean `kl`."""
        error = min(max(kl / self.target - 1, -self.max_error), self.max_error)
        self.coefficient *= 1 + error * min(samples / self.horizon, 1)
        return self.coefficient

    def state_dict(self) -> dict[str, float]:
        """Returns the state for a checkpoint; target and horizon are part of the configuration."""
        return {"coefficient": self.coefficient}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.coefficient = state["coefficient"]


def distillation_advantage(logprob: Tensor, teacher_logprob: Tensor) -> Tensor:
    """log teacher - log student of the sampled tokens, without gradient. [tokens].

    With `policy_gradient`, on policy, the gradient is that of each position's KL(student || teacher).
    """
    return (teacher_logprob - logprob).detach()


def jsd_advantage(logprob: Tensor, teacher_logprob: Tensor, *, beta: float = 0.5) -> Tensor:
    """(1 - beta) (log m - log student) of the sampled tokens, without gradient; m as in `generalised_jsd`. [tokens].

    With `policy_gradient`, on policy, the expected gradient is that of each position's `generalised_jsd`, 0 < beta < 1:
    the derivative of the divergence by a student probability p is (1 - beta) log(p / m).
    """
    student, teacher = logprob.detach(), teacher_logprob.detach()
    return (1 - beta) * (torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta)) - student)


def reverse_kl(student_RV: Tensor, teacher_RV: Tensor, *, temperature: float = 1.0) -> Tensor:
    """KL(student || teacher), mode-seeking (MiniLLM, arXiv:2306.08543; Agarwal et al., arXiv:2306.13649). [rows]."""
    return _kl(_soften(student_RV, temperature), _soften(teacher_RV, temperature))


def forward_kl(student_RV: Tensor, teacher_RV: Tensor, *, temperature: float = 1.0) -> Tensor:
    """KL(teacher || student), mode-covering (arXiv:1503.02531). [rows]."""
    return _kl(_soften(teacher_RV, temperature), _soften(student_RV, temperature))


def generalised_jsd(student_RV: Tensor, teacher_RV: Tensor, *, beta: float = 0.5, temperature: float = 1.0) -> Tensor:
    """beta KL(teacher || m) + (1 - beta) KL(student || m), m = beta teacher + (1 - beta) student. [rows].

    On-policy distillation (arXiv:2306.13649), 0 <= beta <= 1. Divided by beta it tends to the forward KL as beta goes
    to 0, divided by 1 - beta to the reverse KL as beta goes to 1. At the ends, where the formula is 0, these two are
    returned, as in TRL.
    """
    if beta in (0, 1):
        return (reverse_kl if beta else forward_kl)(student_RV, teacher_RV, temperature=temperature)
    student, teacher = _soften(student_RV, temperature), _soften(teacher_RV, temperature)
    mixture = torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))
    return beta * _kl(teacher, mixture) + (1 - beta) * _kl(student, mixture)


def _soften(logprob_RV: Tensor, temperature: float) -> Tensor:
    return logprob_RV if temperature == 1 else torch.log_softmax(logprob_RV / temperature, -1)


def _kl(p_RV: Tensor, q_RV: Tensor) -> Tensor:
    return (p_RV.exp() * (p_RV - q_RV)).sum(-1)
