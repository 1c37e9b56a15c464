"""KL estimators: golden values, exact gradients on a vocabulary of three, and the adaptive coefficient."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rollmill.algorithms.kl import AdaptiveKL, KLEstimator, absolute, get_kl_estimator, unbiased

LOGITS = torch.tensor([0.3, -0.2, 0.5], dtype=torch.float64)
REFERENCE = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64).log()
OLD = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64).log()
GRADIENT = torch.tensor([-0.384834, -0.071962, 0.456796], dtype=torch.float64)  # of KL(pi || ref)


def expected(name: KLEstimator, behaviour: Tensor | None = None) -> tuple[float, Tensor]:
    """Exact expectation of an estimator over samples of `behaviour` (None: the policy), and of its gradient."""
    logits = LOGITS.clone().requires_grad_()
    log_p = torch.log_softmax(logits, 0)
    old = log_p.detach() if behaviour is None else behaviour
    loss = (old.exp() * get_kl_estimator(name)(log_p, REFERENCE, old)).sum()
    return loss.item(), torch.autograd.grad(loss, logits)[0]


@pytest.mark.parametrize(
    ("name", "value"), [("k1", 0.405413), ("k2", 0.545216), ("k3", 0.405413), ("unbiased", 0.405413)]
)
def test_golden_values(name: KLEstimator, value: float) -> None:
    assert expected(name)[0] == pytest.approx(value, abs=1e-6)


@pytest.mark.parametrize(
    ("name", "gradient"),
    [
        ("k1", torch.zeros(3, dtype=torch.float64)),
        ("k2", GRADIENT),
        ("k3", torch.tensor([-0.346385, 0.014478, 0.331906], dtype=torch.float64)),
        ("unbiased", GRADIENT),
    ],
)
def test_golden_gradients_on_policy(name: KLEstimator, gradient: Tensor) -> None:
    torch.testing.assert_close(expected(name)[1], gradient, rtol=0, atol=1e-6)


def test_off_policy_only_the_unbiased_form_keeps_value_and_gradient() -> None:
    logits = LOGITS.clone().requires_grad_()
    log_p = torch.log_softmax(logits, 0)
    exact = (log_p.exp() * (log_p - REFERENCE)).sum()
    gradient = torch.autograd.grad(exact, logits)[0]
    value, estimate = expected("unbiased", OLD)
    assert value == pytest.approx(exact.item(), abs=1e-12)
    torch.testing.assert_close(estimate, gradient, rtol=0, atol=1e-12)
    assert (expected("k2", OLD)[1] - gradient).abs().max() > 0.1
    assert (expected("k3", OLD)[1] - gradient).abs().max() > 0.1


def test_the_ratio_is_differentiated_and_the_old_policy_is_not() -> None:
    logprob = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([-1.5], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-0.7], dtype=torch.float64)
    unbiased(logprob, reference, old).sum().backward()
    ratio, x = math.exp(0.5), math.exp(0.3)
    assert logprob.grad is not None
    assert logprob.grad.item() == pytest.approx(ratio * (x - 1 - 0.3) + ratio * (1 - x))
    assert old.grad is None


def test_absolute_value_and_gradient_are_bounded_linear() -> None:
    logprob = torch.tensor([-1.0, -3.0, -2.0], requires_grad=True)
    value = absolute(logprob, torch.full((3,), -2.0))
    assert value.tolist() == [1, 1, 0]
    assert torch.autograd.grad(value.sum(), logprob)[0].tolist() == [1, -1, 0]


@pytest.mark.parametrize("name", get_args(KLEstimator))
def test_every_name_has_an_estimator_that_is_zero_for_equal_policies(name: KLEstimator) -> None:
    logprob = -torch.rand(20)
    assert (get_kl_estimator(name)(logprob, logprob.clone(), logprob - 0.1) == 0).all()
    differs = get_kl_estimator(name)(logprob, logprob + 0.5, logprob - 0.1)
    assert (differs == 0).all() == (name == "none")


def test_adaptive_coefficient_follows_ziegler() -> None:
    control = AdaptiveKL(0.2, target=6.0, horizon=10000)
    assert control.update(6.6, 256) == pytest.approx(0.2 * (1 + 0.1 * 256 / 10000))
    assert AdaptiveKL(0.2, target=6.0, horizon=10000).update(60.0, 256) == pytest.approx(0.2 * (1 + 0.2 * 0.0256))
    assert AdaptiveKL(0.2, target=6.0, horizon=10000).update(0.0, 256) == pytest.approx(0.2 * (1 - 0.2 * 0.0256))
    assert AdaptiveKL(0.2, target=6.0, horizon=10000).update(6.0, 256) == 0.2
    assert AdaptiveKL(0.2, target=6.0, horizon=100).update(60.0, 150) == pytest.approx(0.2 * 1.2)  # a horizon at most


@given(st.lists(st.tuples(st.floats(-1, 100), st.integers(1, 10**7)), max_size=30))
def test_adaptive_coefficient_stays_positive_and_resumes(batches: list[tuple[float, int]]) -> None:
    control = AdaptiveKL(0.1, target=0.5, horizon=1000)
    for kl, samples in batches:
        assert control.update(kl, samples) > 0
    resumed = AdaptiveKL(7.0, target=0.5, horizon=1000)
    resumed.load_state_dict(control.state_dict())
    assert resumed.update(0.8, 100) == control.update(0.8, 100)


def test_adaptive_coefficient_settles_on_the_target() -> None:
    """Against a policy whose KL is 1 / coefficient, the coefficient goes to 1 / target."""
    control = AdaptiveKL(10.0, target=0.5, horizon=10)
    for _ in range(300):
        control.update(1 / control.coefficient, 5)
    assert control.coefficient == pytest.approx(2.0, rel=1e-6)
