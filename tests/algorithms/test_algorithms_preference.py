"""Preference pairs and reward models."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rollmill.algorithms.preference import bradley_terry, dpo, ipo, pair_logprobs

NUMBER = st.floats(-5, 5)


def _f64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_pairs_are_formed_by_id() -> None:
    logprob = _f64(-1, -2, -4, -8, -16).requires_grad_()
    sequence = torch.tensor([3, 0, 3, 1, 2])
    pair, chosen = torch.tensor([1, 0, 1, 0]), torch.tensor([True, False, False, True])
    sums = pair_logprobs(logprob, sequence, pair, chosen)
    assert [x.tolist() for x in sums] == [[-5, -2], [-8, -16]]
    means = pair_logprobs(logprob, sequence, pair, chosen, mean=True)
    assert [x.tolist() for x in means] == [[-2.5, -2], [-8, -16]]
    gradient = torch.autograd.grad(means[0].sum() - means[1].sum(), logprob)[0]
    assert gradient.tolist() == [0.5, 1, 0.5, -1, -1]


def test_both_completions_of_a_pair_are_found_in_any_order() -> None:
    pair, chosen = torch.tensor([1, 0, 1, 0]), torch.tensor([False, True, True, False])
    sums = pair_logprobs(_f64(-1, -2, -4, -8), torch.arange(4), pair, chosen)
    assert [x.tolist() for x in sums] == [[-2, -4], [-8, -1]]


def test_ipo_by_default_aims_at_a_difference_of_5() -> None:
    assert ipo(_f64(3), _f64(-2), _f64(0), _f64(0)).item() == pytest.approx(0)


def test_a_completion_without_tokens_has_log_prob_zero() -> None:
    last_is_empty = pair_logprobs(_f64(-3.0), torch.tensor([0]), torch.tensor([0, 0]), torch.tensor([True, False]))
    assert [x.tolist() for x in last_is_empty] == [[-3], [0]]


@given(NUMBER, NUMBER, NUMBER, NUMBER, st.floats(0, 0.5))
def test_dpo_closed_form(w: float, l: float, ref_w: float, ref_l: float, e: float) -> None:  # noqa: E741
    chosen, rejected = _f64(w).requires_grad_(), _f64(l).requires_grad_()
    loss = dpo(chosen, rejected, _f64(ref_w), _f64(ref_l), beta=0.3, label_smoothing=e)
    p = _sigmoid(0.3 * ((w - ref_w) - (l - ref_l)))
    assert loss.item() == pytest.approx(-(1 - e) * math.log(p) - e * math.log(1 - p), rel=1e-9, abs=1e-12)
    gradient = torch.autograd.grad(loss.sum(), (chosen, rejected))
    assert gradient[0].item() == pytest.approx(-0.3 * (1 - e - p), rel=1e-9, abs=1e-12)
    assert gradient[1].item() == -gradient[0].item()


def test_dpo_starts_at_log_two_and_smoothing_has_a_finite_optimum() -> None:
    same = _f64(-3, -7)
    torch.testing.assert_close(dpo(same, same, same, same), torch.full((2,), math.log(2)).double())
    best = _f64(math.log(0.9 / 0.1) / 0.1).requires_grad_()  # sigmoid(beta h) = 1 - e
    loss = dpo(best, _f64(0), _f64(0), _f64(0), label_smoothing=0.1)
    assert torch.autograd.grad(loss.sum(), best)[0].item() == pytest.approx(0, abs=1e-15)


def test_dpo_finds_the_optimal_policy_of_the_kl_penalised_reward() -> None:
    """Bradley-Terry preferences over 4 answers: the expected loss is least at ref exp(r / beta) / Z (eq. 4)."""
    reward, reference, beta = _f64(0.2, -0.1, 0.4, 0.0), torch.log(_f64(0.4, 0.3, 0.2, 0.1)), 0.5
    optimal = torch.log_softmax(reference + reward / beta, 0).requires_grad_()
    i, j = (x.flatten() for x in torch.meshgrid(torch.arange(4), torch.arange(4), indexing="ij"))
    preferred = torch.sigmoid(reward[i] - reward[j])
    expected = (preferred * dpo(optimal[i], optimal[j], reference[i], reference[j], beta=beta)).sum()
    assert torch.autograd.grad(expected, optimal)[0].abs().max() < 1e-14


@given(NUMBER, NUMBER, NUMBER, NUMBER)
def test_ipo_closed_form(w: float, l: float, ref_w: float, ref_l: float) -> None:  # noqa: E741
    chosen = _f64(w).requires_grad_()
    loss = ipo(chosen, _f64(l), _f64(ref_w), _f64(ref_l), beta=0.2)
    h = (w - ref_w) - (l - ref_l)
    assert loss.item() == pytest.approx((h - 2.5) ** 2, abs=1e-9)
    assert torch.autograd.grad(loss.sum(), chosen)[0].item() == pytest.approx(2 * (h - 2.5), abs=1e-9)


@given(NUMBER, NUMBER, NUMBER)
def test_bradley_terry_closed_form(chosen: float, rejected: float, margin: float) -> None:
    r = _f64(chosen).requires_grad_()
    loss = bradley_terry(r, _f64(rejected), margin=margin, centre_coefficient=0.01)
    p = _sigmoid(chosen - rejected - margin)
    assert loss.item() == pytest.approx(-math.log(p) + 0.01 * (chosen + rejected) ** 2, rel=1e-9, abs=1e-12)
    expected = -(1 - p) + 0.02 * (chosen + rejected)
    assert torch.autograd.grad(loss.sum(), r)[0].item() == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_bradley_terry_takes_a_margin_per_pair() -> None:
    zero = _f64(0, 0)
    loss = bradley_terry(zero, zero, margin=_f64(0, 1))
    assert loss.tolist() == pytest.approx([math.log(2), math.log(1 + math.e)])
    assert bradley_terry(_f64(9e3), _f64(-9e3)).item() == 0
    assert bradley_terry(_f64(3), _f64(1)).item() == pytest.approx(math.log(1 + math.exp(-2)))  # no margin, no centring
