"""Preference pairs and reward models."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rollmill.algorithms.preference import bradley_terry, dpo, ipo, kto, kto_baseline, log_odds, orpo, pair_logprobs

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


@given(st.floats(-6, -0.01), st.floats(-6, -0.01))
def test_orpo_closed_form(w: float, l: float) -> None:  # noqa: E741
    """Value by odds; gradient by eq. 9 and 10 of the paper: d log odds / d log p is 1 / (1 - p)."""
    chosen, rejected = _f64(w).requires_grad_(), _f64(l).requires_grad_()
    loss = orpo(chosen, rejected)
    odds = [math.exp(x) / (1 - math.exp(x)) for x in (w, l)]
    assert loss.item() == pytest.approx(math.log(1 + odds[1] / odds[0]), rel=1e-6, abs=1e-9)
    pull = 1 / (1 + odds[0] / odds[1])
    gradient = torch.autograd.grad(loss.sum(), (chosen, rejected))
    assert gradient[0].item() == pytest.approx(-pull / (1 - math.exp(w)), rel=1e-6)
    assert gradient[1].item() == pytest.approx(pull / (1 - math.exp(l)), rel=1e-6)


def test_orpo_golden() -> None:
    """p of .5 and .2: odds of 1 and .25, log(1 + .25)."""
    assert orpo(_f64(math.log(0.5)), _f64(math.log(0.2))).item() == pytest.approx(0.2231436)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_log_odds_are_finite_and_exact_at_both_ends(dtype: torch.dtype) -> None:
    logprob = torch.tensor([0.0, -1e-6, -1e-3, -0.6931, -0.6932, -3.0, -50.0, -800.0], dtype=dtype, requires_grad=True)
    values = log_odds(logprob)
    exact = logprob.detach().double().clamp(max=-1e-6)
    expected = exact - torch.log(-torch.expm1(exact))
    torch.testing.assert_close(values.detach().double(), expected, rtol=1e-5, atol=1e-6)
    (gradient,) = torch.autograd.grad(values.sum(), logprob)
    slope = -1 / torch.expm1(exact)  # 1 / (1 - p)
    slope[0] = 0  # clamped
    torch.testing.assert_close(gradient.double(), slope, rtol=1e-5, atol=1e-6)


@given(NUMBER, st.floats(0, 3), st.booleans())
def test_kto_closed_form(r: float, z0: float, desirable: bool) -> None:
    ratio = _f64(r).requires_grad_()
    weights = {"desirable_weight": 1.5, "undesirable_weight": 0.6}
    loss = kto(ratio, torch.tensor([desirable]), torch.tensor(z0, dtype=torch.float64), beta=0.3, **weights)
    weight, sign = (1.5, 1) if desirable else (0.6, -1)
    value = _sigmoid(sign * 0.3 * (r - z0))
    assert loss.item() == pytest.approx(weight * (1 - value), rel=1e-9)
    gradient = torch.autograd.grad(loss.sum(), ratio)[0].item()
    assert gradient == pytest.approx(-sign * weight * 0.3 * value * (1 - value), rel=1e-9)


def test_kto_golden() -> None:
    """beta (r - z0) of log 3 and -log 3: sigmoids of .75 and .25."""
    ratio, z0 = _f64(1 + 10 * math.log(3), 1 - 10 * math.log(3)), torch.tensor(1.0, dtype=torch.float64)
    assert kto(ratio, torch.tensor([True, True]), z0).tolist() == pytest.approx([0.25, 0.75])
    assert kto(ratio, torch.tensor([False, False]), z0).tolist() == pytest.approx([0.75, 0.25])


def test_the_baseline_is_a_mean_that_is_not_negative_and_has_no_gradient() -> None:
    ratios = _f64(1.0, -3.0, 8.0).requires_grad_()
    baseline = kto_baseline(ratios)
    assert baseline.item() == 2
    assert not baseline.requires_grad
    assert kto_baseline(-ratios).item() == 0
    (gradient,) = torch.autograd.grad(kto(ratios, torch.tensor([True] * 3), ratios.mean()).sum(), ratios)
    alone = torch.autograd.grad(kto(ratios, torch.tensor([True] * 3), baseline).sum(), ratios)[0]
    assert gradient.tolist() == alone.tolist()
