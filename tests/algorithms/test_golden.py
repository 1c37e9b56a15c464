"""Golden numbers, properties and traps of the pure functions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rollmill.algorithms import advantages, aggregation, corrections, kl, losses

ONE_HOT = torch.tensor([1.0, 0, 0, 0])
GROUP = torch.zeros(4, dtype=torch.long)
NAN = float("nan")


@pytest.mark.parametrize(
    ("advantage", "expected"),
    [
        (lambda: advantages.mean_baseline(ONE_HOT, GROUP), [0.75, -0.25, -0.25, -0.25]),
        (lambda: advantages.grpo(ONE_HOT, GROUP, ddof=0), [1.7320508, -0.5773503, -0.5773503, -0.5773503]),
        (lambda: advantages.grpo(ONE_HOT, GROUP, ddof=1), [1.5, -0.5, -0.5, -0.5]),
        (lambda: advantages.rloo(ONE_HOT, GROUP), [1, -1 / 3, -1 / 3, -1 / 3]),
        (lambda: advantages.reinforce(ONE_HOT, GROUP), [0.75, -0.25, -0.25, -0.25]),
        (lambda: advantages.reinforce(ONE_HOT, GROUP, baseline="none"), [1.0, 0, 0, 0]),
        (lambda: advantages.grpo(ONE_HOT, GROUP, scale="none"), [0.75, -0.25, -0.25, -0.25]),
    ],
)
def test_golden_advantages(advantage: Callable[[], Tensor], expected: list[float]) -> None:
    torch.testing.assert_close(advantage(), torch.tensor(expected), rtol=1e-5, atol=1e-6)


def test_batch_scale_divides_by_the_deviation_of_all_rewards() -> None:
    rewards, groups = torch.tensor([1.0, 0, 4, 2]), torch.tensor([0, 0, 1, 1])
    expected = torch.tensor([0.5, -0.5, 1, -1]) / rewards.std()
    torch.testing.assert_close(advantages.grpo(rewards, groups, scale="batch"), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("ddof", [0, 1])
def test_batch_scale_takes_the_deviation_of_the_rewards_that_are_there(ddof: int) -> None:
    rewards, groups = torch.tensor([1.0, NAN, 0, 4, 2, NAN]), torch.tensor([0, 0, 0, 1, 1, 2])
    deviation = torch.tensor([1.0, 0, 4, 2]).std(correction=ddof) + 0.25
    expected = torch.tensor([0.5, 0, -0.5, 1, -1, 0]) / deviation
    torch.testing.assert_close(advantages.grpo(rewards, groups, scale="batch", ddof=ddof, eps=0.25), expected)


@pytest.mark.parametrize("ddof", [0, 1])
def test_eps_is_added_to_the_groups_deviation(ddof: int) -> None:
    rewards, groups = torch.tensor([3.0, 0, 0, 5]), torch.tensor([0, 0, 0, 1])
    expected = torch.tensor([2.0, -1, -1, 0]) / (rewards[:3].std(correction=ddof) + 0.5)
    torch.testing.assert_close(advantages.grpo(rewards, groups, ddof=ddof, eps=0.5), expected)


def test_defaults_are_those_of_the_papers() -> None:
    """Without an option: OPMD's mean, AsymRE's baseline .1 lower, REINFORCE's baseline over the batch."""
    rewards, groups = torch.tensor([1.0, 0, 4, 2]), torch.tensor([0, 0, 1, 1])
    torch.testing.assert_close(advantages.opmd(rewards, groups), torch.tensor([0.5, -0.5, 1, -1]))
    sharp = advantages.opmd(rewards, groups, baseline="logavgexp")
    torch.testing.assert_close(sharp, advantages.opmd(rewards, groups, baseline="logavgexp", tau=1.0))
    torch.testing.assert_close(advantages.asymre(rewards, groups), torch.tensor([0.6, -0.4, 1.1, -0.9]))
    torch.testing.assert_close(advantages.reinforce(rewards, groups), rewards - 1.75)


def test_bare_rewards_are_numbers_where_they_are_missing_or_whole() -> None:
    got = advantages.reinforce(torch.tensor([2.0, NAN, float("inf")]), torch.zeros(3), baseline="none")
    assert got.tolist()[:2] == [2, 0]
    whole = advantages.reinforce(torch.tensor([2, 1]), torch.zeros(2), baseline="none")
    assert whole.dtype == torch.float32


def test_whole_rewards_give_fractions() -> None:
    assert advantages.mean_baseline(torch.tensor([1, 0]), torch.tensor([0, 0])).tolist() == [0.5, -0.5]


def test_denominators_of_many_tokens_are_exact() -> None:
    """2^24 + 1 is no number in float32."""
    many = torch.tensor([2**24 + 1])
    expected = torch.tensor([1 / (2**24 + 1)], dtype=torch.float64).float()
    assert torch.equal(aggregation.token_mean(many), expected)
    assert torch.equal(aggregation.sequence_mean(many), expected)


ADVANTAGES = [advantages.grpo, advantages.mean_baseline, advantages.rloo]


@pytest.mark.parametrize("function", ADVANTAGES)
@given(st.floats(-1e3, 1e3), st.integers(1, 9))
def test_equal_rewards_and_groups_of_one_give_exactly_zero(function: object, reward: float, size: int) -> None:
    rewards = torch.full((size,), reward)
    assert (function(rewards, torch.zeros(size, dtype=torch.long)) == 0).all()  # type: ignore[operator]
    assert (function(rewards, torch.arange(size)) == 0).all()  # type: ignore[operator]


@pytest.mark.parametrize("function", [*ADVANTAGES, advantages.reinforce])
@given(st.lists(st.tuples(st.floats(-5, 5, width=32), st.integers(0, 3)), min_size=1, max_size=16), st.randoms())
def test_groups_are_found_by_id_never_by_position(
    function: object, pairs: list[tuple[float, int]], random: object
) -> None:
    order = list(range(len(pairs)))
    random.shuffle(order)  # type: ignore[attr-defined]
    rewards, groups = torch.tensor([p[0] for p in pairs]), torch.tensor([p[1] for p in pairs])
    straight = function(rewards, groups)  # type: ignore[operator]
    torch.testing.assert_close(function(rewards[order], groups[order] * 7 + 3), straight[order])  # type: ignore[operator]


@pytest.mark.parametrize("function", [*ADVANTAGES, advantages.reinforce])
def test_missing_rewards_are_left_out(function: object) -> None:
    rewards, groups = torch.tensor([1.0, NAN, 0, 3, NAN]), torch.tensor([0, 0, 0, 0, 1])
    got = function(rewards, groups)  # type: ignore[operator]
    assert got[1] == got[4] == 0
    keep = [0, 2, 3]
    torch.testing.assert_close(got[keep], function(rewards[keep], groups[keep]))  # type: ignore[operator]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_rloo_is_unbiased_and_the_mean_baseline_short_by_one_gth(size: int) -> None:
    """Exact expectation over all G-tuples of one-token completions."""
    logits = torch.tensor([0.3, -0.2, 0.5, 0.1], dtype=torch.float64, requires_grad=True)
    reward = torch.tensor([1.0, 0.0, 0.3, 0.7], dtype=torch.float64)
    log_p = torch.log_softmax(logits, 0)
    exact = torch.autograd.grad((log_p.exp() * reward).sum(), logits, retain_graph=True)[0]
    groups = torch.zeros(size, dtype=torch.long)
    surrogate = {"rloo": torch.zeros((), dtype=torch.float64), "mean_baseline": torch.zeros((), dtype=torch.float64)}
    for sample in itertools.product(range(4), repeat=size):
        index = torch.tensor(sample)
        probability = log_p[index].sum().exp().detach()
        for name in surrogate:
            advantage = getattr(advantages, name)(reward[index], groups)
            surrogate[name] = surrogate[name] + probability * (advantage * log_p[index]).mean()
    gradient = {n: torch.autograd.grad(s, logits, retain_graph=True)[0] for n, s in surrogate.items()}
    torch.testing.assert_close(gradient["rloo"], exact, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(gradient["mean_baseline"], (1 - 1 / size) * exact, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("size", "expected"), [(2, 1.000), (4, 1.658), (8, 2.107), (64, 2.469)])
def test_standard_deviation_turns_the_objective_into_arcsin(size: int, expected: float) -> None:
    """dJ/dp of GRPO's normalised advantage at Bernoulli p = .2: E[sum A_i dlog p_i/dp] / G (population std)."""
    p, total = 0.2, 0.0
    for right in range(size + 1):
        rewards = torch.tensor([1.0] * right + [0.0] * (size - right), dtype=torch.float64)
        advantage = advantages.grpo(rewards, torch.zeros(size, dtype=torch.long), ddof=0, eps=0.0)
        score = torch.where(rewards == 1, 1 / p, -1 / (1 - p))
        chance = math.comb(size, right) * p**right * (1 - p) ** (size - right)
        total += chance * float((advantage * score).mean())
    assert total == pytest.approx(expected, abs=1e-3)


def test_overlong_penalty() -> None:
    lengths = torch.tensor([100, 16384, 18432, 20480, 30000])
    assert advantages.overlong_penalty(lengths, 20480, 4096).tolist() == [0, 0, -0.5, -1, -1]


def test_clip_bounds_each_side() -> None:
    old = torch.zeros(6)
    logprob = torch.log(torch.tensor([0.5, 0.6, 1.0, 1.3, 1.8, 5.0])).requires_grad_()
    up = torch.ones(6)
    loss = losses.ppo_clip(logprob, old, up, clip_low=0.2, clip_high=0.28)
    torch.testing.assert_close(loss, -torch.tensor([0.5, 0.6, 1.0, 1.28, 1.28, 1.28]))
    (gradient,) = torch.autograd.grad(loss.sum(), logprob)
    torch.testing.assert_close(gradient, -torch.tensor([0.5, 0.6, 1.0, 0, 0, 0]))
    loss = losses.ppo_clip(logprob, old, -up, clip_low=0.2, clip_high=0.28, dual_clip=3.0)
    torch.testing.assert_close(loss, torch.tensor([0.8, 0.8, 1.0, 1.3, 1.8, 3.0]))
    assert losses.clipped(logprob, old, up, clip_low=0.2, clip_high=0.28).tolist() == [False] * 3 + [True] * 3
    assert losses.clipped(logprob, old, -up, clip_low=0.2, clip_high=0.28).tolist() == [True] * 2 + [False] * 4


def test_kl_golden_numbers() -> None:
    logits = torch.tensor([0.3, -0.2, 0.5], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64).log()
    log_p = torch.log_softmax(logits, 0)
    p = log_p.exp()
    expectation = {name: (p * getattr(kl, name)(log_p, reference)).sum().item() for name in ("k1", "k2", "k3")}
    assert expectation["k1"] == pytest.approx(0.405413, abs=1e-6)
    assert expectation["k2"] == pytest.approx(0.545216, abs=1e-6)
    assert expectation["k3"] == pytest.approx(0.405413, abs=1e-6)

    def as_loss(name: str) -> Tensor:
        loss = (p.detach() * getattr(kl, name)(log_p, reference)).sum()
        return torch.autograd.grad(loss, logits, retain_graph=True)[0]

    exact = torch.autograd.grad((p * (log_p - reference)).sum(), logits, retain_graph=True)[0]
    golden = torch.tensor([-0.384834, -0.071962, 0.456796], dtype=torch.float64)
    torch.testing.assert_close(exact, golden, rtol=0, atol=1e-6)
    torch.testing.assert_close(as_loss("k1"), torch.zeros(3, dtype=torch.float64), rtol=0, atol=1e-12)
    torch.testing.assert_close(as_loss("k2"), exact, rtol=1e-10, atol=1e-12)
    other = torch.tensor([-0.346385, 0.014478, 0.331906], dtype=torch.float64)
    torch.testing.assert_close(as_loss("k3"), other, rtol=0, atol=1e-6)


def test_k3_is_exactly_zero_for_equal_policies() -> None:
    logprob = torch.randn(100)
    assert (kl.k3(logprob, logprob.clone()) == 0).all()


def test_truncated_importance_is_capped_and_carries_no_gradient() -> None:
    old = torch.log(torch.tensor([0.5, 1.0, 4.0])).requires_grad_()
    weight = corrections.truncated_importance(old, torch.zeros(3), 2.0)
    torch.testing.assert_close(weight, torch.tensor([0.5, 1.0, 2.0]))
    assert not weight.requires_grad


def test_aggregation_weights() -> None:
    lengths = torch.tensor([1, 3, 0, 4])
    torch.testing.assert_close(aggregation.token_mean(lengths), torch.tensor([1, 1, 0, 1]) / 8)
    torch.testing.assert_close(aggregation.sequence_mean(lengths), torch.tensor([1 / 3, 1 / 9, 0, 1 / 12]))
    torch.testing.assert_close(aggregation.sequence_sum_mean(lengths), torch.tensor([1, 1, 0, 1]) / 3)
    torch.testing.assert_close(aggregation.constant(lengths, max_length=10), torch.tensor([1, 1, 0, 1]) / 30)


@pytest.mark.parametrize("function", [aggregation.token_mean, aggregation.sequence_mean, aggregation.sequence_sum_mean])
def test_nothing_to_learn_from_gives_zero_not_nan(function: object) -> None:
    assert function(torch.zeros(3, dtype=torch.long)).tolist() == [0, 0, 0]  # type: ignore[operator]
