"""Distillation from a teacher on the student's own tokens.

R rows (positions), V vocabulary. Log-probs over the vocabulary are finite, with the gradient on the student's. They are
at temperature 1; `temperature` divides both. Divergences are [rows], in nats, without the factor temperature^2.
Published with token-mean.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


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
    """KL(student || teacher): seeks modes (MiniLLM, arXiv:2306.08543; Agarwal et al., arXiv:2306.13649). [rows]."""
    return _kl(_soften(student_RV, temperature), _soften(teacher_RV, temperature))


def forward_kl(student_RV: Tensor, teacher_RV: Tensor, *, temperature: float = 1.0) -> Tensor:
    """KL(teacher || student): covers modes (arXiv:1503.02531). [rows]."""
    return _kl(_soften(teacher_RV, temperature), _soften(student_RV, temperature))


def generalised_jsd(student_RV: Tensor, teacher_RV: Tensor, *, beta: float = 0.5, temperature: float = 1.0) -> Tensor:
    """beta KL(teacher || m) + (1 - beta) KL(student || m), m = beta teacher + (1 - beta) student. [rows].

    On-policy distillation (arXiv:2306.13649), 0 <= beta <= 1. Divided by beta it tends to the forward KL as beta goes
    to 0, divided by 1 - beta to the reverse KL as beta goes to 1. At the ends, where the formula is 0, it is these two,
    as in TRL.
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
