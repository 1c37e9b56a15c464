"""Advantages beyond the group baseline: closed forms, exact enumeration, loop references, invariants."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rollmill.algorithms.advantages import (
    asymre,
    gdpo,
    grpo,
    mean_baseline,
    opmd,
    remax,
    rloo,
    whiten,
)
from rollmill.algorithms.token_advantages import (
    discounted_returns,
    gae,
    gigpo,
    length_adaptive_lambda,
    reward_at_last_token,
    stepwise,
)
from rollmill.algorithms.token_advantages import reinforce_plus_plus as per_token

NAN = float("nan")
ONE_HOT = torch.tensor([1.0, 0, 0, 0])
GROUP = torch.zeros(4, dtype=torch.long)
Advantage = Callable[[Tensor, Tensor], Tensor]


def doubles(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def ids(*values: int) -> Tensor:
    return torch.tensor(values)


def reinforce_plus_plus(rewards: Tensor, groups: Tensor, lengths: Tensor | None = None, **options: Any) -> Tensor:
    """Without a KL in the reward all tokens of a completion have one advantage."""
    lengths = torch.ones_like(groups) if lengths is None else lengths
    sequence = torch.arange(len(rewards)).repeat_interleave(lengths)
    values = per_token(rewards, groups, sequence, **({"eps": 1e-6} | options))
    first = lengths.cumsum(0) - lengths
    assert torch.equal(values, values[first].repeat_interleave(lengths))
    return values[first].to(rewards.dtype)


def two_parts(rewards: Tensor, groups: Tensor) -> Tensor:
    """GDPO with the reward and its square as parts."""
    return gdpo(torch.stack([rewards, rewards**2], 1), groups)


COMPARED: list[Advantage] = [
    opmd,
    partial(opmd, baseline="logavgexp", tau=0.5),
    asymre,
    partial(reinforce_plus_plus, baseline="group"),
    two_parts,
]
ALL: list[Advantage] = [
    *COMPARED,
    reinforce_plus_plus,
    partial(asymre, keep_uniform=True),
    lambda rewards, groups: remax(rewards, groups * 0.25),
]
BATCHES = st.lists(st.tuples(st.integers(-8, 8).map(lambda n: n / 4), st.integers(0, 3)), min_size=1, max_size=16)


@pytest.mark.parametrize(
    ("advantage", "expected"),
    [
        (lambda: opmd(ONE_HOT, GROUP), [0.75, -0.25, -0.25, -0.25]),
        (lambda: asymre(ONE_HOT, GROUP, beta=0.1), [0.85, -0.15, -0.15, -0.15]),
        (lambda: reinforce_plus_plus(ONE_HOT, GROUP, ddof=0), [1.7320508, -0.5773503, -0.5773503, -0.5773503]),
        (lambda: reinforce_plus_plus(ONE_HOT, GROUP, ddof=1, baseline="group"), [1.5, -0.5, -0.5, -0.5]),
        (lambda: remax(ONE_HOT, torch.tensor([1.0, 1, 0, NAN])), [0.0, -1, 0, 0]),
        (lambda: gdpo(ONE_HOT[:, None], GROUP), [1.5, -0.5, -0.5, -0.5]),
    ],
)
def test_golden_advantages(advantage: Callable[[], Tensor], expected: list[float]) -> None:
    torch.testing.assert_close(advantage(), torch.tensor(expected), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("function", COMPARED)
@given(st.floats(-1e2, 1e2), st.integers(1, 9))
def test_equal_rewards_and_groups_of_one_give_exactly_zero(function: Advantage, reward: float, size: int) -> None:
    rewards = torch.full((size,), reward)
    assert (function(rewards, torch.zeros(size, dtype=torch.long)) == 0).all()
    assert (function(torch.cat([rewards, torch.arange(size) / 3]), torch.arange(2 * size)) == 0).all()


@pytest.mark.parametrize("function", COMPARED)
def test_a_uniform_group_beside_others_gives_exactly_zero(function: Advantage) -> None:
    got = function(torch.tensor([0.1, 1, 0.1, 0, 0.1, 0.3]), ids(0, 1, 0, 1, 0, 2))
    assert (got[[0, 2, 4, 5]] == 0).all()
    assert (got[[1, 3]] != 0).all()


def test_a_uniform_group_stays_at_zero_where_lengths_shift_the_mean_of_the_batch() -> None:
    rewards, groups, lengths = doubles(1, 0, 0.1, 0.1), ids(0, 0, 1, 1), ids(9, 1, 5, 5)
    got = reinforce_plus_plus(rewards, groups, baseline="group", lengths=lengths)
    assert got[2:].tolist() == [0, 0]
    assert abs(got[0]) != abs(got[1])


@pytest.mark.parametrize("function", ALL)
@given(BATCHES, st.randoms(use_true_random=False))
def test_groups_are_found_by_id_never_by_position(
    function: Advantage, pairs: list[tuple[float, int]], random: object
) -> None:
    order = list(range(len(pairs)))
    random.shuffle(order)  # type: ignore[attr-defined]
    rewards, groups = doubles(*(p[0] for p in pairs)), ids(*(p[1] for p in pairs))
    torch.testing.assert_close(function(rewards[order], groups[order]), function(rewards, groups)[order])


@pytest.mark.parametrize("function", ALL)
@given(BATCHES, st.lists(st.integers(0, 16), max_size=4))
def test_missing_rewards_are_left_out(function: Advantage, pairs: list[tuple[float, int]], places: list[int]) -> None:
    rewards, groups = [p[0] for p in pairs], [p[1] for p in pairs]
    for place in places:
        rewards.insert(place, NAN)
        groups.insert(place, place % 4)
    r, g = doubles(*rewards), ids(*groups)
    judged = ~r.isnan()
    got = function(r, g)
    assert (got[~judged] == 0).all()
    torch.testing.assert_close(got[judged], function(r[judged], g[judged]))


@pytest.mark.parametrize("function", ALL)
def test_nothing_judged_gives_zeros(function: Advantage) -> None:
    assert function(torch.tensor([NAN, NAN]), ids(0, 1)).tolist() == [0, 0]
    assert function(torch.zeros(0), torch.zeros(0, dtype=torch.long)).shape == (0,)


def test_remax_is_unbiased_for_any_reward_of_the_greedy_completion() -> None:
    """Exact expectation over a vocabulary of four."""
    logits = doubles(0.3, -0.2, 0.5, 0.1).requires_grad_()
    reward = doubles(1, 0, 0.3, 0.7)
    log_p = torch.log_softmax(logits, 0)
    exact = torch.autograd.grad((log_p.exp() * reward).sum(), logits, retain_graph=True)[0]
    advantage = remax(reward, reward[logits.argmax()].expand(4))
    estimate = torch.autograd.grad((log_p.exp().detach() * advantage * log_p).sum(), logits)[0]
    torch.testing.assert_close(estimate, exact, rtol=1e-10, atol=1e-12)


@given(BATCHES, st.sampled_from([0.05, 0.5, 1.0, 30.0]))
def test_log_of_the_average_exponential_matches_a_loop(pairs: list[tuple[float, int]], tau: float) -> None:
    rewards, groups = [p[0] for p in pairs], [p[1] for p in pairs]
    expected = []
    for r, g in pairs:
        group = [other for other, i in pairs if i == g]
        baseline = tau * math.log(sum(math.exp(x / tau) for x in group) / len(group))
        expected.append(r - baseline if len(set(group)) > 1 else 0.0)
    got = opmd(doubles(*rewards), ids(*groups), baseline="logavgexp", tau=tau)
    torch.testing.assert_close(got, doubles(*expected), rtol=1e-9, atol=1e-9)


def test_log_of_the_average_exponential_at_both_ends_of_tau() -> None:
    rewards = doubles(1, 0, 0.25, 0.25)
    for tau in (10.0, 100.0):
        baseline = (rewards - opmd(rewards, GROUP, baseline="logavgexp", tau=tau))[0]
        assert baseline.item() == pytest.approx(
            rewards.mean().item() + rewards.var(correction=0).item() / (2 * tau), abs=0.1 / tau**2
        )
    sharp = opmd(rewards, GROUP, baseline="logavgexp", tau=1e-3)
    torch.testing.assert_close(sharp, rewards - 1, rtol=0, atol=2e-3)
    assert opmd(doubles(5000, 0), ids(0, 0), baseline="logavgexp", tau=1.0).isfinite().all()


def test_asymre_as_published_raises_uniform_groups() -> None:
    rewards, groups = torch.tensor([0.1, 0.1, 0.1, NAN, 3.0]), ids(0, 0, 0, 0, 1)
    expected = torch.tensor([0.2, 0.2, 0.2, 0, 0.2])
    torch.testing.assert_close(asymre(rewards, groups, beta=0.2, keep_uniform=True), expected)


def test_reinforce_plus_plus_normalises_over_the_whole_batch() -> None:
    rewards, groups = [1.0, 0, 4, 2, 7], [0, 0, 1, 1, 2]
    mean, std = statistics.mean(rewards), statistics.stdev(rewards)
    got = reinforce_plus_plus(doubles(*rewards), ids(*groups), eps=0)
    torch.testing.assert_close(got, doubles(*((r - mean) / std for r in rewards)))
    centred = [0.5, -0.5, 1, -1, 0]
    got = reinforce_plus_plus(doubles(*rewards), ids(*groups), baseline="group", eps=0)
    torch.testing.assert_close(got, doubles(*(c / statistics.stdev(centred) for c in centred)))


def test_reinforce_plus_plus_takes_off_the_penalties_still_to_come() -> None:
    rewards, groups, sequence = doubles(1, 0, NAN), ids(0, 0, 0), ids(0, 0, 1, 2)
    penalty = torch.tensor([0.25, 0.5, 1.0, 8.0])
    returns = doubles(1 - 0.75, 1 - 0.5, 0 - 1)
    got = per_token(rewards, groups, sequence, penalty)
    torch.testing.assert_close(got, torch.cat([(returns - returns.mean()) / returns.std(), doubles(0)]))
    uniform = per_token(doubles(1, 1), ids(0, 0), sequence[:3], penalty[:3], baseline="group")
    returns = doubles(-0.75, -0.5, -1)  # the penalties differ where the rewards do not
    torch.testing.assert_close(uniform, (returns - returns.mean()) / returns.std())


def test_the_groups_mean_of_reinforce_plus_plus_counts_an_episode_once() -> None:
    rewards, groups, tokens = doubles(1, 1, 0, 3, 0), ids(0, 0, 0, 1, 1), torch.arange(5)
    once = per_token(rewards, groups, tokens, episodes_S=ids(7, 7, 2, 4, 1), baseline="group")
    torch.testing.assert_close(once, whiten(doubles(0.5, 0.5, -0.5, 1.5, -1.5)))
    each = per_token(rewards, groups, tokens, baseline="group")
    torch.testing.assert_close(each, whiten(doubles(1 / 3, 1 / 3, -2 / 3, 1.5, -1.5)))


def test_reinforce_plus_plus_is_computed_in_float64_and_bounded_by_eps() -> None:
    rewards = 1000 + torch.rand(200, generator=torch.Generator().manual_seed(0))
    groups, tokens = torch.arange(200) // 4, torch.arange(200)
    for baseline in ("none", "group"):
        exact = per_token(rewards.double(), groups, tokens, baseline=baseline)  # type: ignore[arg-type]
        got = per_token(rewards, groups, tokens, baseline=baseline)  # type: ignore[arg-type]
        assert got.dtype == torch.float64
        torch.testing.assert_close(got, exact, rtol=0, atol=1e-6)
    tiny = per_token(doubles(1e-8, 3e-8), ids(0, 0), ids(0, 1), ddof=0)
    torch.testing.assert_close(tiny, doubles(-0.5, 0.5))


def test_lengths_count_an_experience_once_per_token() -> None:
    rewards, lengths = doubles(1, 0, 0.5), ids(1, 4, 2)
    tokens = whiten(rewards.repeat_interleave(lengths), eps=1e-6)
    got = reinforce_plus_plus(rewards, ids(0, 0, 0), lengths=lengths)
    torch.testing.assert_close(got.repeat_interleave(lengths), tokens)
    centred = whiten(mean_baseline(rewards, ids(0, 0, 0)).repeat_interleave(lengths), eps=1e-6)
    got = reinforce_plus_plus(rewards, ids(0, 0, 0), baseline="group", lengths=lengths)
    torch.testing.assert_close(got.repeat_interleave(lengths), centred)


@given(st.lists(st.tuples(st.integers(-20, 20), st.booleans()), min_size=1, max_size=20), st.sampled_from([0, 1]))
def test_whitened_values_have_mean_0_and_deviation_1(pairs: list[tuple[int, bool]], ddof: int) -> None:
    values, counted = doubles(*(p[0] / 4 for p in pairs)), torch.tensor([p[1] for p in pairs])
    got = whiten(values, counted, ddof=ddof)
    assert (got[~counted] == 0).all()
    picked = got[counted]
    if len(set(values[counted].tolist())) < 2:
        assert (picked == 0).all()
    else:
        assert picked.mean().item() == pytest.approx(0, abs=1e-9)
        assert picked.std(correction=ddof).item() == pytest.approx(1, abs=1e-6)


def test_whitening_does_not_hide_a_counted_nan() -> None:
    assert whiten(doubles(1, NAN, 2)).isnan().all()
    assert whiten(doubles(1, NAN, 2), torch.tensor([True, False, True])).isfinite().all()


def test_a_weighted_value_counts_as_often_as_its_weight_says() -> None:
    values, times = doubles(1, 0, 0.5, 9), ids(1, 4, 2, 3)
    counted = torch.tensor([True, True, True, False])
    for ddof in (0, 1):
        repeated = whiten(values[:3].repeat_interleave(times[:3]), ddof=ddof, eps=0.5)
        got = whiten(values, counted, weights=times, ddof=ddof, eps=0.5)
        torch.testing.assert_close(got[:3].repeat_interleave(times[:3]), repeated)
        assert got[3] == 0
    exact = whiten(doubles(0, 1), weights=doubles(2**24, 1), ddof=0)  # as float32, 2^24 + 1 is 2^24
    rounded = whiten(torch.tensor([0.0, 1]), weights=torch.tensor([2.0**24, 1]), ddof=0)
    assert torch.equal(rounded, exact.float())


def test_the_deviation_of_tiny_values_is_not_all_that_divides() -> None:
    """Values 1 and 3 times 1e-8 deviate by 1e-8, and 1e-8 is added."""
    torch.testing.assert_close(whiten(doubles(1e-8, 3e-8), ddof=0), doubles(-0.5, 0.5))
    torch.testing.assert_close(whiten(doubles(1, 3), ddof=0, eps=1.0), doubles(-0.5, 0.5))


def test_whitening_whole_numbers_gives_fractions() -> None:
    torch.testing.assert_close(whiten(torch.tensor([1, 3]), ddof=0), torch.tensor([-1.0, 1.0]))
    assert whiten(doubles(0.1, 0.1, 0.1)).tolist() == [0, 0, 0]  # although their sum is not 3 times .1


def test_whitening_is_done_in_float64() -> None:
    generator = torch.Generator().manual_seed(0)
    values = 1000 + torch.rand(1000, generator=generator)
    torch.testing.assert_close(whiten(values), whiten(values.double()).float(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("seed", range(5))
def test_gdpo_gives_exactly_zero_where_every_part_is_uniform(seed: int) -> None:
    """Although the mean over the batch, which whitening takes off, is 0 only up to rounding."""
    parts = torch.rand(9, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    parts[6:] = doubles(0.1, 0.2, 0.7)
    got = gdpo(parts, ids(0, 0, 0, 1, 1, 1, 2, 2, 2), weights=[0.3, 0.7, 1.1])
    assert got[6:].tolist() == [0, 0, 0]
    assert (got[:6] != 0).all()


def test_gdpo_does_not_look_at_parts_without_weight() -> None:
    """An experience with no other part is not judged."""
    parts = doubles(1, 0, 0, 1, NAN, 7, 0.5, 3).reshape(4, 2)
    got = gdpo(parts, GROUP, weights=[1, 0])
    torch.testing.assert_close(got[[0, 1, 3]], gdpo(parts[[0, 1, 3], :1], GROUP[:3]))
    assert got[2] == 0


@pytest.mark.parametrize("ddof", [0, 1])
def test_gdpo_normalises_by_its_deviation_twice(ddof: int) -> None:
    parts, groups = doubles(1, 0, 0, 3, 1, 1).reshape(6, 1), ids(0, 0, 0, 1, 1, 1)
    apart = grpo(parts[:, 0], groups, ddof=ddof, eps=0.5)
    torch.testing.assert_close(gdpo(parts, groups, ddof=ddof, eps=0.5, whitened=False), apart)
    expected = apart / (apart.std(correction=ddof) + 0.5)
    torch.testing.assert_close(gdpo(parts, groups, ddof=ddof, eps=0.5), expected)


def test_gdpo_sums_in_float64() -> None:
    parts = torch.rand(300, 2, generator=torch.Generator().manual_seed(0))
    groups = torch.arange(300) // 10
    assert torch.equal(gdpo(parts, groups), gdpo(parts.double(), groups).float())


def test_gdpo_keeps_apart_what_a_sum_of_rewards_confuses() -> None:
    """The paper's example: two binary rewards, (0, 1) against (0, 2) in sum; GRPO cannot tell them apart."""
    groups = ids(0, 0, 1, 1)
    parts = doubles(0, 0, 0, 1, 0, 0, 1, 1).reshape(4, 2)
    together = grpo(parts.sum(1), groups, eps=0)
    torch.testing.assert_close(together[:2], together[2:])
    apart = gdpo(parts, groups, eps=0, whitened=False)
    torch.testing.assert_close(apart[2:], 2 * apart[:2])
    torch.testing.assert_close(gdpo(parts, groups, eps=0), apart / apart.std())


def test_gdpo_weights_parts_after_their_normalisation() -> None:
    parts = doubles(1, 30, 0, 10, 0, 20).reshape(3, 2)
    groups = ids(0, 0, 0)
    expected = 0.5 * grpo(parts[:, 0], groups) + 2 * grpo(parts[:, 1], groups)
    torch.testing.assert_close(gdpo(parts, groups, weights=[0.5, 2], whitened=False), expected)
    one = gdpo(parts, groups, weights=[1, 0])
    torch.testing.assert_close(one, gdpo(parts[:, :1], groups))


def test_gdpo_learns_from_the_parts_that_apply() -> None:
    parts = doubles(1, 3, 0, NAN, 0, 2, 5, 1).reshape(4, 2)
    got = gdpo(parts, GROUP, whitened=False)
    columns = [grpo(parts[:, k], GROUP) for k in (0, 1)]
    assert columns[1][1] == 0
    torch.testing.assert_close(got, columns[0] + columns[1])
    nothing = doubles(NAN, NAN, NAN, NAN, 1, 0, NAN, NAN).reshape(4, 2)
    assert gdpo(nothing, GROUP).tolist() == [0, 0, 0, 0]


# --- per token -------------------------------------------------------------------------------------------------------


def loop_gae(
    values: list[float], rewards: list[float], sequence: list[int], gamma: float, lam: dict[int, float]
) -> list[float]:
    """Schulman's backward recursion, one token at a time."""
    result, after = [0.0] * len(values), dict.fromkeys(sequence, (0.0, 0.0))
    for t in reversed(range(len(values))):
        next_value, next_advantage = after[sequence[t]]
        delta = rewards[t] + gamma * next_value - values[t]
        result[t] = delta + gamma * lam[sequence[t]] * next_advantage
        after[sequence[t]] = (values[t], result[t])
    return result


@pytest.mark.parametrize(
    ("lam", "expected"), [(1.0, [0.5, 0.4, 0.3]), (0.95, [0.46575, 0.385, 0.3]), (0.0, [0.1, 0.1, 0.3])]
)
def test_gae_golden_numbers(lam: float, expected: list[float]) -> None:
    values, sequence = doubles(0.5, 0.6, 0.7), ids(0, 0, 0)
    got = gae(values, reward_at_last_token(doubles(1), sequence), sequence, lam=lam)
    torch.testing.assert_close(got.advantages, doubles(*expected), rtol=0, atol=1e-12)
    torch.testing.assert_close(got.returns, values + doubles(*expected))


TOKENS = st.lists(
    st.tuples(st.floats(-2, 2), st.floats(-2, 2), st.integers(0, 4)), min_size=1, max_size=40
)  # value, reward, sequence


def columns(tokens: list[tuple[float, float, int]]) -> tuple[Tensor, Tensor, Tensor]:
    values, rewards, sequence = zip(*tokens, strict=True)
    return doubles(*values), doubles(*rewards), ids(*sequence)


@given(TOKENS, st.floats(0, 1), st.lists(st.floats(0, 1), min_size=5, max_size=5))
def test_gae_equals_the_backward_loop_with_a_lambda_for_each_sequence(
    tokens: list[tuple[float, float, int]], gamma: float, lam: list[float]
) -> None:
    values, rewards, sequence = columns(tokens)
    got = gae(values, rewards, sequence, gamma=gamma, lam=doubles(*lam))
    expected = loop_gae(values.tolist(), rewards.tolist(), sequence.tolist(), gamma, dict(enumerate(lam)))
    torch.testing.assert_close(got.advantages, doubles(*expected), rtol=1e-10, atol=1e-10)
    one = gae(values, rewards, sequence, gamma=gamma, lam=lam[0])
    expected = loop_gae(values.tolist(), rewards.tolist(), sequence.tolist(), gamma, dict.fromkeys(range(5), lam[0]))
    torch.testing.assert_close(one.advantages, doubles(*expected), rtol=1e-10, atol=1e-10)


@given(TOKENS)
def test_gae_without_discount_is_return_minus_value(tokens: list[tuple[float, float, int]]) -> None:
    values, rewards, sequence = columns(tokens)
    got = gae(values, rewards, sequence)
    to_come = [sum(r for _, r, i in tokens[t:] if i == tokens[t][2]) for t in range(len(tokens))]
    torch.testing.assert_close(got.returns, doubles(*to_come), rtol=0, atol=1e-10)
    torch.testing.assert_close(got.advantages, doubles(*to_come) - values, rtol=0, atol=1e-10)
    torch.testing.assert_close(discounted_returns(rewards, sequence), doubles(*to_come), rtol=0, atol=1e-10)


@given(TOKENS, st.permutations(range(5)))
def test_gae_is_the_same_in_any_order_of_sequences(
    tokens: list[tuple[float, float, int]], order: tuple[int, ...]
) -> None:
    values, rewards, sequence = columns(tokens)
    rows = torch.cat([(sequence == i).nonzero()[:, 0] for i in order])
    mixed = gae(values, rewards, sequence, gamma=0.9, lam=0.8)
    sorted_ = gae(values[rows], rewards[rows], sequence[rows] * 10 + 3, gamma=0.9, lam=0.8)
    torch.testing.assert_close(sorted_.advantages, mixed.advantages[rows])
    torch.testing.assert_close(sorted_.returns, mixed.returns[rows])


def test_gae_of_a_long_sequence_in_float32() -> None:
    """2,000 tokens: sums are in float64, so the result is the loop's, rounded once."""
    generator = torch.Generator().manual_seed(0)
    values, rewards = torch.randn(2, 2000, generator=generator)
    sequence = torch.zeros(2000, dtype=torch.long)
    got = gae(values, rewards, sequence, gamma=0.999, lam=0.99)
    expected = torch.tensor(loop_gae(values.tolist(), rewards.tolist(), [0] * 2000, 0.999, {0: 0.99}))
    assert got.advantages.dtype == got.returns.dtype == torch.float32
    torch.testing.assert_close(got.advantages, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(got.returns, expected + values, rtol=1e-6, atol=1e-6)
    lam = torch.tensor([0.999])
    got = gae(values, rewards, sequence, gamma=0.999, lam=lam).advantages
    expected = loop_gae(values.tolist(), rewards.tolist(), [0] * 2000, 0.999, {0: lam.item()})
    torch.testing.assert_close(got, torch.tensor(expected), rtol=1e-6, atol=1e-6)
    exact = discounted_returns(rewards.double(), sequence, gamma=0.999)
    assert torch.equal(discounted_returns(rewards, sequence, gamma=0.999), exact.float())


def test_gae_of_a_sequence_without_a_reward_teaches_nothing() -> None:
    values, sequence = torch.tensor([0.5, 0.1, 0.6, 0.2]).requires_grad_(), ids(0, 1, 0, 1)
    got = gae(values, reward_at_last_token(torch.tensor([NAN, 1.0]), sequence), sequence, lam=0.9)
    assert (got.advantages[[0, 2]] == 0).all()
    assert torch.equal(got.returns[[0, 2]], values[[0, 2]])
    alone = gae(values[[1, 3]], torch.tensor([0, 1.0]), ids(0, 0), lam=0.9)
    torch.testing.assert_close(got.advantages[[1, 3]], alone.advantages)
    assert not got.advantages.requires_grad
    assert not got.returns.requires_grad


def test_a_terminal_reward_lies_on_the_last_token() -> None:
    assert reward_at_last_token(torch.tensor([1.0, 2, 3]), ids(2, 0, 0, 2, 0)).tolist() == [0, 0, 0, 3, 1]


def test_lambda_grows_with_the_length() -> None:
    got = length_adaptive_lambda(ids(100, 1000, 20, 5, 0))
    torch.testing.assert_close(got, doubles(0.8, 0.98, 0, 0, 0))
    weights = got[1] ** torch.arange(20000)
    assert weights.sum().item() == pytest.approx(0.05 * 1000)


# --- per step --------------------------------------------------------------------------------------------------------


def test_the_baseline_counts_each_episode_once() -> None:
    rewards = torch.tensor([1.0, 1, 1, 1, 1, 0, 0, 0])
    groups, episodes = ids(0, 0, 0, 0, 0, 0, 0, 0), ids(5, 5, 5, 5, 5, 2, 8, 9)
    expected = torch.tensor([1.5] * 5 + [-0.5] * 3)
    torch.testing.assert_close(stepwise(rewards, groups, episodes), expected, rtol=1e-5, atol=1e-5)
    shared = torch.tensor([0.75 / 5] * 5 + [-0.25] * 3)
    torch.testing.assert_close(stepwise(rewards, groups, episodes, advantage=mean_baseline, per_step=True), shared)


EPISODES = st.lists(
    st.tuples(st.integers(0, 8).map(lambda n: n / 4), st.integers(1, 4), st.integers(0, 2)), min_size=1, max_size=8
)  # reward, steps, group


@given(EPISODES, st.randoms(use_true_random=False))
def test_steps_get_their_episodes_advantage_wherever_they_lie(
    drawn: list[tuple[float, int, int]], random: object
) -> None:
    rewards, groups = doubles(*(e[0] for e in drawn)), ids(*(e[2] for e in drawn))
    episode = ids(*(i for i, e in enumerate(drawn) for _ in range(e[1])))
    order = list(range(len(episode)))
    random.shuffle(order)  # type: ignore[attr-defined]
    episode = episode[order]
    got = stepwise(rewards[episode], groups[episode], episode * 3 + 1, advantage=rloo)
    torch.testing.assert_close(got, rloo(rewards, groups)[episode])


def test_one_judged_step_is_enough_and_none_gives_zero() -> None:
    rewards = torch.tensor([NAN, 1.0, 0.0, NAN, NAN])
    got = stepwise(rewards, ids(0, 0, 0, 0, 0), ids(0, 0, 1, 1, 2), advantage=mean_baseline)
    assert got.tolist() == [0.5, 0.5, -0.5, -0.5, 0]


def loop_gigpo(
    steps: list[tuple[float, int, int]], group_of: list[int], weight: float, gamma: float, normed: bool
) -> list[float]:
    """The definition, with lists: steps are (reward, episode, state)."""

    def relative(value: float, others: list[float]) -> float:
        if len(set(others)) == 1:
            return 0.0
        return (value - statistics.mean(others)) / ((statistics.stdev(others) + 1e-6) if normed else 1)

    totals = {e: sum(r for r, f, _ in steps if f == e) for _, e, _ in steps}
    returns = []
    for t, (_, episode, _) in enumerate(steps):
        later = [r for r, e, _ in steps[t:] if e == episode]
        returns.append(sum(gamma**k * r for k, r in enumerate(later)))
    result = []
    for t, (_, episode, state) in enumerate(steps):
        group = group_of[episode]
        macro = relative(totals[episode], [total for e, total in totals.items() if group_of[e] == group])
        alike = [g for g, (_, e, s) in zip(returns, steps, strict=True) if s == state and group_of[e] == group]
        result.append(macro + weight * relative(returns[t], alike))
    return result


@given(
    st.lists(st.tuples(st.integers(-4, 4).map(float), st.integers(0, 4), st.integers(0, 2)), min_size=1, max_size=24),
    st.lists(st.integers(0, 1), min_size=5, max_size=5),
    st.sampled_from([0.5, 1.0]),
    st.booleans(),
)
def test_gigpo_equals_its_definition(
    steps: list[tuple[float, int, int]], group_of: list[int], gamma: float, normed: bool
) -> None:
    rewards, episodes, states = zip(*steps, strict=True)
    got = gigpo(
        doubles(*rewards),
        ids(*(group_of[e] for e in episodes)),
        ids(*episodes),
        ids(*states),
        weight=0.7,
        gamma=gamma,
        scale="group" if normed else "none",
    )
    expected = loop_gigpo(steps, group_of, 0.7, gamma, normed)
    torch.testing.assert_close(got, doubles(*expected), rtol=1e-6, atol=1e-6)


def test_gigpo_tells_steps_of_one_episode_apart() -> None:
    """Two episodes from state 0; the first goes wrong by way of state 1, where it is alone, and returns to 0."""
    rewards = doubles(0, 0, 1, 1)
    got = gigpo(rewards, ids(0, 0, 0, 0), ids(0, 0, 0, 1), ids(0, 1, 0, 0), gamma=0.5, scale="none")
    torch.testing.assert_close(got, doubles(0.25 - 0.75, 0, 0.25, 0.25))


def test_gigpo_by_default_discounts_by_a_twentieth_and_divides_by_the_deviation() -> None:
    """Of two episodes alike the first gets its reward a step later, so that its return in the shared state is less."""
    rewards, episodes, states = doubles(0, 1, 1), ids(0, 0, 1), ids(0, 1, 0)
    got = gigpo(rewards, ids(0, 0, 0), episodes, states, scale="none")
    torch.testing.assert_close(got, doubles((0.95 - 1) / 2, 0, (1 - 0.95) / 2))
    both = doubles(0.95, 1)
    for options, divisor in (({}, both.std() + 1e-6), ({"ddof": 0, "eps": 0.5}, both.std(correction=0) + 0.5)):
        got = gigpo(rewards, ids(0, 0, 0), episodes, states, **options)  # type: ignore[arg-type]
        torch.testing.assert_close(got, doubles(-0.025, 0, 0.025) / divisor)


def test_gigpo_gives_nothing_to_the_steps_behind_a_missing_reward() -> None:
    rewards, episodes, states = doubles(NAN, 5, 0, 2), ids(0, 0, 1, 2), ids(0, 1, 1, 1)
    got = gigpo(rewards, ids(0, 0, 0, 0), episodes, states, scale="none")
    assert got.tolist() == [0, 0, -2, 2]


def test_gigpo_is_computed_in_float64() -> None:
    rewards = 100 + torch.rand(200, generator=torch.Generator().manual_seed(0))
    where = (torch.arange(200) // 20, torch.arange(200) // 4, torch.arange(200) % 2)
    got = gigpo(rewards, *where)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), gigpo(rewards.double(), *where), rtol=0, atol=2e-6)


def test_gigpo_leaves_out_an_episode_with_a_missing_reward() -> None:
    rewards = doubles(1, NAN, 0, 2, 1, 0)
    groups, episodes, states = ids(0, 0, 0, 0, 0, 0), ids(0, 0, 1, 1, 2, 2), ids(0, 1, 0, 1, 0, 1)
    got = gigpo(rewards, groups, episodes, states)
    assert got[:2].tolist() == [0, 0]
    torch.testing.assert_close(got[2:], gigpo(rewards[2:], groups[2:], episodes[2:], states[2:]))
