"""Distillation and value losses against closed forms."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributions import Categorical, kl_divergence

from rollmill.algorithms.kl import (
    distillation_advantage,
    forward_kl,
    generalised_jsd,
    jsd_advantage,
    reverse_kl,
)
from rollmill.algorithms.losses import policy_gradient, value_loss

STUDENT = torch.tensor([[0.3, -0.2, 0.5, 0.0, 1.0], [0.1, 0.1, -2.0, 0.4, 0.2]], dtype=torch.float64)
TEACHER = torch.tensor([[0.7, 0.2, -0.1, 0.9, -1.0], [0.0, 1.5, 0.3, -0.4, 0.2]], dtype=torch.float64)


def _log_probs(logits: Tensor, temperature: float = 1.0) -> Tensor:
    return torch.log_softmax(logits / temperature, -1)


@pytest.mark.parametrize("temperature", [1.0, 2.0, 2.5, 0.4])
def test_divergences_are_those_of_the_softened_distributions(temperature: float) -> None:
    student, teacher = (Categorical(logits=x / temperature) for x in (STUDENT, TEACHER))
    inputs = _log_probs(STUDENT), _log_probs(TEACHER)
    torch.testing.assert_close(reverse_kl(*inputs, temperature=temperature), kl_divergence(student, teacher))
    torch.testing.assert_close(forward_kl(*inputs, temperature=temperature), kl_divergence(teacher, student))
    for beta in (0.1, 0.5, 0.9):
        mixture = Categorical(probs=beta * teacher.probs + (1 - beta) * student.probs)
        expected = beta * kl_divergence(teacher, mixture) + (1 - beta) * kl_divergence(student, mixture)
        torch.testing.assert_close(generalised_jsd(*inputs, beta=beta, temperature=temperature), expected)


def test_golden_kl() -> None:
    student = _log_probs(torch.tensor([[0.3, -0.2, 0.5]], dtype=torch.float64))
    teacher = torch.tensor([[0.7, 0.2, 0.1]], dtype=torch.float64).log()
    assert reverse_kl(student, teacher).item() == pytest.approx(0.405413, abs=1e-6)


def test_gradients_of_the_logits() -> None:
    """Reverse: p_i (log p_i / q_i - KL); forward: p - q; by hand."""
    logits = STUDENT.clone().requires_grad_()
    student, teacher = _log_probs(logits), _log_probs(TEACHER)
    p, q = student.detach().exp(), teacher.exp()
    log_ratio = student.detach() - teacher
    reverse = torch.autograd.grad(reverse_kl(student, teacher).sum(), logits, retain_graph=True)[0]
    torch.testing.assert_close(reverse, p * (log_ratio - (p * log_ratio).sum(-1, keepdim=True)))
    forward = torch.autograd.grad(forward_kl(student, teacher).sum(), logits, retain_graph=True)[0]
    torch.testing.assert_close(forward, p - q)
    assert torch.autograd.gradcheck(lambda x: generalised_jsd(_log_probs(x), teacher, beta=0.3), logits)


def test_jsd_tends_to_both_kls_and_is_symmetric_at_a_half() -> None:
    student, teacher = _log_probs(STUDENT), _log_probs(TEACHER)
    small = 1e-6
    near_0, near_1 = (generalised_jsd(student, teacher, beta=b) / small for b in (small, 1 - small))
    torch.testing.assert_close(near_0, forward_kl(student, teacher), rtol=1e-4, atol=0)
    torch.testing.assert_close(near_1, reverse_kl(student, teacher), rtol=1e-4, atol=0)
    torch.testing.assert_close(generalised_jsd(student, teacher), generalised_jsd(teacher, student))


def test_sampled_tokens_give_the_gradient_of_the_reverse_kl() -> None:
    """Exact expectation over the vocabulary of 5."""
    logits = STUDENT[0].clone().requires_grad_()
    student, teacher = _log_probs(logits), _log_probs(TEACHER[0])
    advantage = distillation_advantage(student, teacher)
    assert not advantage.requires_grad
    torch.testing.assert_close(advantage, teacher - student.detach())
    loss = (student.detach().exp() * policy_gradient(student, advantage)).sum()
    got = torch.autograd.grad(loss, logits, retain_graph=True)[0]
    exact = torch.autograd.grad(reverse_kl(student[None], teacher[None]).sum(), logits)[0]
    torch.testing.assert_close(got, exact, rtol=1e-12, atol=1e-14)


def test_value_loss_takes_the_worse_of_both_errors() -> None:
    """Beyond the clip: no gradient if the step went towards the return, the full one if it went away from it."""
    value = torch.tensor([1.1, 2.0, 2.0, 0.0, 0.0], dtype=torch.float64, requires_grad=True)
    old, returns = torch.ones(5).double(), torch.tensor([3.0, 3.0, 0.0, 3.0, 0.0], dtype=torch.float64)
    loss = value_loss(value, old, returns)
    expected = [0.5 * 1.9**2, 0.5 * 1.8**2, 0.5 * 2**2, 0.5 * 3**2, 0.5 * 0.8**2]
    assert loss.tolist() == pytest.approx(expected)
    (gradient,) = torch.autograd.grad(loss.sum(), value)
    assert gradient.tolist() == pytest.approx([-1.9, 0, 2, -3, 0])


@given(st.floats(-3, 3), st.floats(-3, 3), st.floats(-3, 3))
def test_value_clipping_never_lowers_the_loss(value: float, old: float, returns: float) -> None:
    v, v_old, r = (torch.tensor([x], dtype=torch.float64) for x in (value, old, returns))
    plain = value_loss(v, v_old, r, clip=None).item()
    assert plain == pytest.approx(0.5 * (value - returns) ** 2)
    assert value_loss(v, v_old, r).item() >= plain
    assert value_loss(v, v, r).item() == plain


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_the_ends_of_jsd_are_the_two_kls(temperature: float) -> None:
    student, teacher = _log_probs(STUDENT), _log_probs(TEACHER)
    for beta, kl in ((0, forward_kl), (1, reverse_kl)):
        expected = kl(student, teacher, temperature=temperature)
        assert torch.equal(generalised_jsd(student, teacher, beta=beta, temperature=temperature), expected)


@pytest.mark.parametrize("beta", [0.1, 0.5, 0.9])
def test_sampled_jsd_has_the_gradient_of_jsd_by_enumeration(beta: float) -> None:
    """Over all tokens, each as often as the student samples it. The token's own share of the divergence as the reward,
    which Trinity-RFT's `jsd` has, gives another gradient."""
    logits = STUDENT.clone().requires_grad_()
    student, teacher = _log_probs(logits), _log_probs(TEACHER)
    exact = torch.autograd.grad(generalised_jsd(student, teacher, beta=beta).sum(), logits, retain_graph=True)[0]

    def expected(advantage: Tensor) -> Tensor:
        loss = (student.detach().exp() * policy_gradient(student, advantage)).sum()
        return torch.autograd.grad(loss, logits, retain_graph=True)[0]

    advantage = jsd_advantage(student, teacher, beta=beta)
    assert not advantage.requires_grad
    torch.testing.assert_close(expected(advantage), exact)
    p, q = student.detach().exp(), teacher.exp()
    m = beta * q + (1 - beta) * p
    share = beta * q * (q / m).log() + (1 - beta) * p * (p / m).log()
    torch.testing.assert_close(share.sum(-1), generalised_jsd(student.detach(), teacher, beta=beta))
    assert torch.cosine_similarity(expected(-share).flatten(), exact.flatten(), 0) < 0.9


def test_golden_jsd_of_a_sampled_token() -> None:
    """p .2, teacher .6, beta .25: m is .3, and .75 log(.3 / .2)."""
    p, q = (torch.tensor([x], dtype=torch.float64).log() for x in (0.2, 0.6))
    assert jsd_advantage(p, q, beta=0.25).item() == pytest.approx(0.3040988)
    assert not jsd_advantage(p, q.requires_grad_()).requires_grad
