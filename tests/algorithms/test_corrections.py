"""Off-policy corrections: bounds, gradients, and bias by exact enumeration."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rollmill.algorithms.corrections import (
    decoupled_importance,
    geometric_rejection,
    interpolated_proximal,
    k3_rejection,
    masked_importance,
    off_policy_sequence_mask,
    sequence_masked_importance,
    sequence_truncated_importance,
    truncated_importance,
)
from rollmill.algorithms.losses import policy_gradient, ppo_clip

INF = float("inf")


def _f64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_bounds_are_inclusive() -> None:
    """Of log-ratios of 0 everything that is taken off or compared is exact."""
    same, alone = _f64(-1.0), torch.tensor([0])
    for low, high in ((1.0, 2.0), (0.5, 1.0)):
        assert masked_importance(same, same, low=low, high=high).item() == 1
        assert sequence_masked_importance(same, same, alone, low=low, high=high).item() == 1
        assert geometric_rejection(same, same, alone, low=low, high=high).item() == 1
    assert k3_rejection(same, same, alone, bound=0.0).item() == 1
    assert off_policy_sequence_mask(same, same + 0.5, _f64(-1.0), alone, delta=0.5).item() == 1


def test_only_sequences_of_negative_advantage_are_masked_for_being_far_off() -> None:
    alone = torch.tensor([0])
    for advantage, kept in ((-0.5, 0), (0.0, 1), (0.5, 1)):
        assert off_policy_sequence_mask(_f64(-2.0), _f64(-1.0), _f64(advantage), alone).item() == kept


def test_default_bounds_are_those_of_the_papers() -> None:
    """IcePop: .5 to 5; the geometric mean as in verl: .999 to 1.001; AReaL: 5 at most, or nothing."""
    ratio = _f64(0.45, 0.55, 4.9, 5.5)
    old, zero = ratio.log(), torch.zeros(4).double()
    torch.testing.assert_close(masked_importance(old, zero), _f64(0, 0.55, 4.9, 0))
    torch.testing.assert_close(sequence_masked_importance(old, zero, torch.arange(4)), _f64(0, 0.55, 4.9, 0))
    near = _f64(0.9985, 0.9995, 1.0005, 1.0015)
    assert geometric_rejection(near.log(), zero, torch.arange(4)).tolist() == [0, 1, 1, 0]
    torch.testing.assert_close(decoupled_importance(old, zero), _f64(0.45, 0.55, 4.9, 0))
    torch.testing.assert_close(decoupled_importance(old, zero, cap=2.0), _f64(0.45, 0.55, 0, 0))
    torch.testing.assert_close(decoupled_importance(old, zero, cap=2.0, beyond="cap"), _f64(0.45, 0.55, 2, 2))


def test_asymmetric_bounds_are_not_inverted() -> None:
    """Bounds .5 and 1.5 keep .6 and reject 1.8, tokens and sequences alike."""
    ratio = _f64(0.4, 0.6, 1.4, 1.8)
    old, zero, alone = ratio.log(), torch.zeros(4).double(), torch.arange(4)
    kept = _f64(0, 1, 1, 0)
    torch.testing.assert_close(masked_importance(old, zero, low=0.5, high=1.5), kept * ratio)
    torch.testing.assert_close(sequence_masked_importance(old, zero, alone, low=0.5, high=1.5), kept * ratio)
    assert geometric_rejection(old, zero, alone, low=0.5, high=1.5).tolist() == kept.tolist()


def test_sequence_weights_are_products_over_the_sequence() -> None:
    old, zero = torch.log(_f64(2, 0.5, 3, 0.1)), torch.zeros(4).double()
    sequence = torch.tensor([1, 0, 1, 0])
    torch.testing.assert_close(sequence_truncated_importance(old, zero, sequence, INF), _f64(6, 0.05, 6, 0.05))
    torch.testing.assert_close(sequence_truncated_importance(old, zero, sequence, 2.0), _f64(2, 0.05, 2, 0.05))
    torch.testing.assert_close(sequence_masked_importance(old, zero, sequence, low=0.01), _f64(0, 0.05, 0, 0.05))
    torch.testing.assert_close(sequence_masked_importance(old, zero, sequence, high=6.5), _f64(6, 0, 6, 0))


def test_geometric_mean_cancels_where_k3_does_not() -> None:
    """Ratios 2 and 1/2: their geometric mean is 1; the mean of x - 1 - log x is .25. 1.05 twice: 1.05 and .00121."""
    old, zero = torch.log(_f64(2, 0.5, 1.05, 1.05)), torch.zeros(4).double()
    sequence = torch.tensor([0, 0, 1, 1])
    assert geometric_rejection(old, zero, sequence).tolist() == [1, 1, 0, 0]
    assert k3_rejection(old, zero, sequence).tolist() == [0, 0, 1, 1]
    assert k3_rejection(old, zero, sequence, bound=0.2501).tolist() == [1, 1, 1, 1]
    assert k3_rejection(old, zero, sequence, bound=0.2499).tolist() == [0, 0, 1, 1]
    small = 0.05 - math.log(1.05)
    assert k3_rejection(old, zero, sequence, bound=small * 0.999).tolist() == [0, 0, 0, 0]


def test_k3_is_measured_from_the_rollout() -> None:
    """x = pi_old / pi_rollout = 4: x - 1 - log x = 1.61; the other way round it would be .636."""
    for bound, kept in ((1.62, 1), (1.61, 0)):
        assert k3_rejection(_f64(math.log(4)), _f64(0), torch.tensor([0]), bound=bound).tolist() == [kept]


def test_off_policy_mask_drops_negative_sequences_the_policy_left() -> None:
    rollout, sequence = torch.zeros(6).double(), torch.tensor([0, 0, 1, 1, 2, 2])
    logprob = _f64(-0.3, 0.0, -0.3, 0.0, 0.3, 0.0)  # mean(lp_roll - lp): .15, .15, -.15
    advantage = _f64(-1, -1, 1, 1, -1, -1)
    assert off_policy_sequence_mask(logprob, rollout, advantage, sequence).tolist() == [0, 0, 1, 1, 1, 1]
    assert off_policy_sequence_mask(logprob, rollout, advantage, sequence, delta=0.2).tolist() == [1] * 6


def test_decoupled_weights_beyond_the_cap() -> None:
    proximal, zero = torch.log(_f64(0.01, 1, 4.9, 7)), torch.zeros(4).double()
    torch.testing.assert_close(decoupled_importance(proximal, zero), _f64(0.01, 1, 4.9, 0))
    torch.testing.assert_close(decoupled_importance(proximal, zero, beyond="cap"), _f64(0.01, 1, 4.9, 5))
    torch.testing.assert_close(decoupled_importance(proximal, zero, cap=2, beyond="cap"), _f64(0.01, 1, 2, 2))


@given(st.lists(st.tuples(st.floats(-4, -0.125), st.floats(-0.5, 0.5), st.floats(-2, 2)), min_size=1, max_size=8))
def test_decoupled_ppo_is_ppo_where_the_proximal_policy_sampled(rows: list[tuple[float, float, float]]) -> None:
    proximal, step, advantage = (_f64(*column) for column in zip(*rows, strict=True))
    logprob = (proximal + step).requires_grad_()
    ppo = ppo_clip(logprob, proximal, advantage)
    decoupled = decoupled_importance(proximal, proximal) * ppo_clip(logprob, proximal, advantage)
    assert torch.equal(decoupled, ppo)
    gradients = [torch.autograd.grad(x.sum(), logprob)[0] for x in (decoupled, ppo)]
    assert torch.equal(*gradients)


def test_interpolated_proximal_lies_on_the_way_by_version() -> None:
    logprob, rollout = _f64(-1, -1, -1, -1), _f64(-2, -2, -2, -2)
    got = interpolated_proximal(logprob, rollout, torch.tensor([0, 1, 3, 99]))
    torch.testing.assert_close(got, _f64(-2, -1.5, -1.25, -1.01))
    stored = interpolated_proximal(logprob, rollout.float(), torch.tensor([0, 1, 3, 99]))  # log-probs of engines
    assert torch.equal(stored, got)


@given(st.lists(st.floats(-5, -0.01), min_size=3, max_size=3), st.integers(0, 9))
def test_interpolated_proximal_is_exact_where_log_probs_move_evenly(line: list[float], staleness: int) -> None:
    """Log-probs that move by the same amount with each version: the stand-in is the proximal policy's own."""
    start, slope = _f64(*line), _f64(0.1, -0.2, 0.05)
    rollout, proximal, trained = start, start + slope * staleness, start + slope * (staleness + 1)
    d = torch.full((3,), staleness)
    torch.testing.assert_close(interpolated_proximal(trained, rollout, d), proximal, rtol=1e-12, atol=1e-12)


SEQUENCE = torch.tensor([0, 0, 1])
WEIGHTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "tis": lambda old, roll: truncated_importance(old, roll, 2.0),
    "sequence-tis": lambda old, roll: sequence_truncated_importance(old, roll, SEQUENCE, 2.0),
    "icepop": masked_importance,
    "sequence-mis": lambda old, roll: sequence_masked_importance(old, roll, SEQUENCE),
    "geometric": lambda old, roll: geometric_rejection(old, roll, SEQUENCE),
    "k3": lambda old, roll: k3_rejection(old, roll, SEQUENCE),
    "off-policy": lambda old, roll: off_policy_sequence_mask(old, roll, _f64(-1, -1, 1), SEQUENCE),
    "decoupled": decoupled_importance,
    "decoupled-cap": lambda old, roll: decoupled_importance(old, roll, beyond="cap"),
}


@pytest.mark.parametrize("name", list(WEIGHTS))
def test_weights_carry_no_gradient_and_are_one_on_policy(name: str) -> None:
    logprob = _f64(-1, -0.5, -2).requires_grad_()
    weight = WEIGHTS[name](logprob, logprob)
    assert not weight.requires_grad
    assert weight.dtype == torch.float64
    assert weight.tolist() == [1, 1, 1]


def test_the_interpolated_proximal_carries_no_gradient() -> None:
    logprob = _f64(-1, -0.5).requires_grad_()
    assert not interpolated_proximal(logprob, logprob, torch.tensor([1, 2])).requires_grad


@pytest.mark.parametrize("name", list(WEIGHTS))
def test_hopelessly_different_log_probs_give_finite_weights(name: str) -> None:
    far = torch.full((3,), 900.0)
    for sign in (1, -1):
        assert WEIGHTS[name](sign * far, torch.zeros(3)).isfinite().all()


# Bias, by enumeration of all sequences of two tokens out of three


FIRST, SECOND = _f64(0.3, -0.2, 0.5), _f64(0.1, 0.8, -0.4, 0.6, 0.0, -0.9, -0.3, 0.2, 0.7).view(3, 3)
ROLL_FIRST, ROLL_SECOND = _f64(0.9, 0.1, -0.8), _f64(-0.5, 0.3, 0.2, 0.0, 0.9, -0.1, 0.6, -0.6, 0.1).view(3, 3)


def _estimated_gradient(weigh: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """E_rollout[sum_t w_t R grad log pi_t] and grad E_pi[R], over the logits of the first and the second token."""
    logits = torch.cat([FIRST, SECOND.flatten()]).requires_grad_()
    first, second = torch.log_softmax(logits[:3], 0), torch.log_softmax(logits[3:].view(3, 3), 1)
    roll_first, roll_second = torch.log_softmax(ROLL_FIRST, 0), torch.log_softmax(ROLL_SECOND, 1)
    surrogate, value = torch.zeros(()).double(), torch.zeros(()).double()
    for i, j in itertools.product(range(3), repeat=2):
        reward = math.cos(2 * i + 5 * j)
        logprob = torch.stack([first[i], second[i, j]])
        rollout = torch.stack([roll_first[i], roll_second[i, j]])
        loss = weigh(logprob, rollout) * policy_gradient(logprob, torch.full((2,), reward, dtype=torch.float64))
        surrogate = surrogate - rollout.sum().exp() * loss.sum()
        value = value + logprob.sum().exp() * reward
    estimate = torch.autograd.grad(surrogate, logits, retain_graph=True)[0]
    return estimate, torch.autograd.grad(value, logits)[0]


def test_the_untruncated_sequence_weight_is_unbiased() -> None:
    together = torch.tensor([0, 0])
    estimate, exact = _estimated_gradient(lambda lp, roll: sequence_truncated_importance(lp, roll, together, INF))
    torch.testing.assert_close(estimate, exact, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    "weigh",
    [
        lambda lp, roll: truncated_importance(lp, roll, 1.5),
        lambda lp, roll: truncated_importance(lp, roll, INF),  # a token's weight ignores the rest of its sequence
        lambda lp, roll: sequence_truncated_importance(lp, roll, torch.tensor([0, 0]), 1.5),
        lambda lp, roll: masked_importance(lp, roll, low=0.5, high=1.5),
        lambda lp, roll: torch.ones_like(lp),
    ],
    ids=["token-tis", "token", "sequence-tis", "icepop", "none"],
)
def test_token_weights_and_truncation_are_biased(weigh: Callable[[Tensor, Tensor], Tensor]) -> None:
    estimate, exact = _estimated_gradient(weigh)
    assert (estimate - exact).norm() > 0.05 * exact.norm()
