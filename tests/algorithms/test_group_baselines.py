"""OPO, the optimal token baseline, pass@k and RAFT's acceptance: closed forms, brute force, numbers by hand."""

from __future__ import annotations

import itertools
import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rollmill.algorithms.advantages import best_of_group, opo, pass_at_k
from rollmill.algorithms.sequence_losses import gmpo, gmpo_clipped, gspo, vespo
from rollmill.algorithms.token_advantages import optimal_token_baseline

NAN = float("nan")
ONE_HOT = torch.tensor([1.0, 0, 0, 0]).double()
GROUP = torch.zeros(4, dtype=torch.long)


def test_opo_weighs_the_baseline_by_length() -> None:
    lengths = torch.tensor([3, 1, 1, 1])
    assert opo(ONE_HOT, GROUP, lengths).tolist() == pytest.approx([0.5, -0.5, -0.5, -0.5])
    assert opo(ONE_HOT, GROUP, torch.full((4,), 7)).tolist() == pytest.approx([0.75, -0.25, -0.25, -0.25])
    missing = torch.tensor([1.0, NAN, 0.0, 0.5]).double()
    assert opo(missing, GROUP, torch.tensor([1, 9, 1, 2])).tolist() == pytest.approx([0.5, 0, -0.5, 0])
    two = torch.tensor([0, 1, 0, 1])
    assert opo(torch.tensor([1.0, 0.3, 0.0, 0.3]), two, lengths).tolist() == pytest.approx([0.25, 0, -0.75, 0])
    assert opo(ONE_HOT, GROUP, torch.tensor([0, 1, 1, 0])).tolist() == pytest.approx([1, 0, 0, 0])
    assert opo(ONE_HOT, GROUP, torch.tensor([1, 0, 0, 0])).tolist() == [0, -1, -1, -1]
    assert opo(ONE_HOT, GROUP, torch.zeros(4).long()).tolist() == [1, 0, 0, 0], "without a token there is no baseline"


def test_opo_minimises_the_variance_where_squared_gradients_grow_with_the_length() -> None:
    """sum_i T_i (r_i - b)^2 is least at the baseline."""
    r, lengths = torch.tensor([1.0, 0.2, 0.0, 0.7]).double(), torch.tensor([5, 2, 9, 1])
    baseline = float((r - opo(r, GROUP, lengths))[0])
    costs = [float((lengths * (r - b) ** 2).sum()) for b in (baseline - 1e-3, baseline, baseline + 1e-3)]
    assert costs[1] == min(costs)


def test_the_optimal_token_baseline_by_hand() -> None:
    """Two completions of two tokens and one: p .5 and .9, then .6; all of a vocabulary of two."""
    sequence = torch.tensor([0, 1, 0])  # the tokens of a sequence need not stand together
    p = torch.tensor([0.5, 0.6, 0.9]).double()
    collision = p**2 + (1 - p) ** 2
    weight = [2 * (1 - x) ** 2 for x in (0.5, 0.6, 0.9)]  # 1 - 2p + sum p^2, of two words
    r, groups = torch.tensor([1.0, 0.0]).double(), torch.tensor([0, 0])
    values = optimal_token_baseline(r, groups, sequence, p.log(), collision)
    first = weight[0] / (weight[0] + weight[1])
    assert values.tolist() == pytest.approx([1 - first, -first, 0.0], abs=1e-6)
    tail = optimal_token_baseline(r, groups, sequence, p.log(), collision, zero_tail=True)
    assert tail.tolist() == pytest.approx([1 - first, -first, 1.0], abs=1e-6)
    # A penalty counts from its token on: .2 on the second token takes it off both of the first completion.
    penalty = torch.tensor([0.1, 0.0, 0.2]).double()
    got = optimal_token_baseline(r, groups, sequence, p.log(), collision, penalty, zero_tail=True)
    assert got.tolist() == pytest.approx([0.7 - 0.7 * first, -0.7 * first, 0.8], abs=1e-6)


def test_the_second_token_has_the_weight_of_both() -> None:
    sequence, p = torch.tensor([0, 0, 1, 1]), torch.tensor([0.5, 0.8, 0.5, 0.5]).double()
    values = optimal_token_baseline(
        torch.tensor([1.0, 0.0]), torch.tensor([7, 7]), sequence, p.log(), p**2 + (1 - p) ** 2
    )
    second = (0.5 + 0.08) / (0.5 + 0.08 + 1.0)
    assert values.tolist() == pytest.approx([0.5, 1 - second, -0.5, -second], abs=1e-6)


def test_the_optimal_token_baseline_leaves_out_what_has_no_reward_and_uniform_groups() -> None:
    sequence, groups = torch.arange(5), torch.tensor([0, 0, 0, 1, 1])
    p = torch.full((5,), 0.5).double()
    rewards = torch.tensor([1.0, NAN, 0.0, 0.4, 0.4]).double()
    values = optimal_token_baseline(rewards, groups, sequence, p.log(), p)
    assert values.tolist() == pytest.approx([0.5, 0, -0.5, 0, 0], abs=1e-6)
    assert values[3:].abs().max() == 0


def test_a_rollout_of_several_experiences_weighs_once_in_the_optimal_token_baseline() -> None:
    p, rewards = torch.full((3,), 0.5).double(), torch.tensor([1.0, 1.0, 0.0]).double()
    alone = optimal_token_baseline(rewards[1:], torch.zeros(2).long(), torch.arange(2), p[1:].log(), p[1:])
    forked = optimal_token_baseline(
        rewards, torch.zeros(3).long(), torch.arange(3), p.log(), p, episodes_S=torch.tensor([4, 4, 9])
    )
    torch.testing.assert_close(forked, alone[[0, 0, 1]])


def loop_token_baseline(
    rewards: list[float],
    groups: list[int],
    sequence: list[int],
    power: list[float],
    penalty: list[float] | None,
    episodes: list[int],
    zero_tail: bool,
    eps: float,
) -> list[float]:
    """The definition, with lists."""
    rows = [[u for u, i in enumerate(sequence) if i == own] for own in range(len(rewards))]
    ranks = [rows[i].index(t) for t, i in enumerate(sequence)]
    weights = [sum(power[u] for u in rows[i] if u <= t) / episodes.count(episodes[i]) for t, i in enumerate(sequence)]
    returns = [rewards[i] - sum(penalty[u] for u in rows[i] if u >= t and penalty) for t, i in enumerate(sequence)]
    values = []
    for t, own in enumerate(sequence):
        judged = {r for r, g in zip(rewards, groups, strict=True) if g == groups[own] and not math.isnan(r)}
        if math.isnan(rewards[own]) or (penalty is None and len(judged) < 2):
            values.append(0.0)
            continue
        alike = [u for u, i in enumerate(sequence) if groups[i] == groups[own] and ranks[u] == ranks[t]]
        alike = [u for u in alike if not math.isnan(rewards[sequence[u]])]
        baseline = sum(weights[u] * returns[u] for u in alike) / (sum(weights[u] for u in alike) + eps)
        values.append(returns[t] - (0.0 if zero_tail and len(alike) < 2 else baseline))
    return values


@pytest.mark.parametrize("zero_tail", [False, True])
@pytest.mark.parametrize("penalised", [False, True])
@pytest.mark.parametrize("forked", [False, True])
def test_the_optimal_token_baseline_equals_a_loop(zero_tail: bool, penalised: bool, forked: bool) -> None:
    """Four groups: a mixed one, one with a missing reward, a uniform one, and one with a single reward."""
    generator = torch.Generator().manual_seed(5)
    rewards = torch.tensor([1.0, 0.3, 0.3, 0.7, NAN, 0.2, 0.4, 0.4, NAN, 0.9]).double()
    groups, episodes = [3, 3, 3, 1, 1, 1, 2, 2, 0, 0], [0, 1, 1, 2, 3, 4, 5, 6, 7, 8]
    lengths = torch.randint(1, 7, (10,), generator=generator)
    sequence = torch.arange(10).repeat_interleave(lengths)
    sequence = sequence[torch.randperm(len(sequence), generator=generator)]
    p, penalty = torch.rand(2, len(sequence), generator=generator, dtype=torch.float64)
    collision = p**2 + (1 - p) ** 2
    got = optimal_token_baseline(
        rewards,
        torch.tensor(groups),
        sequence,
        p.log(),
        collision,
        penalty if penalised else None,
        episodes_S=torch.tensor(episodes) if forked else None,
        zero_tail=zero_tail,
        eps=0.25,
    )
    rest = (penalty.tolist() if penalised else None, episodes if forked else list(range(10)), zero_tail, 0.25)
    power = (1 - 2 * p + collision).tolist()
    expected = loop_token_baseline(rewards.tolist(), groups, sequence.tolist(), power, *rest)
    assert got.tolist() == pytest.approx(expected, rel=1e-6, abs=1e-7)


def test_the_optimal_token_baseline_is_computed_in_float64() -> None:
    """Tokens of a probability near 1, whose weights 2 (1 - p)^2 are small differences."""
    generator = torch.Generator().manual_seed(0)
    logprob = -1e-3 * torch.rand(24, generator=generator)
    collision = (logprob.double().exp() ** 2 + (1 - logprob.double().exp()) ** 2).float()
    rewards, penalty = torch.rand(8, generator=generator), torch.rand(24, generator=generator)
    where = torch.arange(8) // 4, torch.arange(24) % 8
    for extra in ((), (penalty,)):
        got = optimal_token_baseline(rewards, *where, logprob, collision, *extra)
        exact = (x.double() for x in (logprob, collision, *extra))
        assert torch.equal(got, optimal_token_baseline(rewards.double(), *where, *exact))


def test_pass_at_k_of_right_and_wrong_is_the_papers_closed_form() -> None:
    """arXiv:2508.10751: n completions, c of them right, groups of k."""
    for n, c, k in ((4, 1, 2), (8, 3, 4), (6, 5, 3), (5, 2, 5)):
        rewards = torch.tensor([1.0] * c + [0.0] * (n - c)).double()
        values = pass_at_k(rewards, torch.zeros(n).long(), k=k)
        mean = 1 - math.comb(n - c, k) / math.comb(n, k)
        deviation = math.sqrt(mean * (1 - mean)) + 1e-6
        right = (1 - mean) / deviation
        wrong = (1 - mean - math.comb(n - c - 1, k - 1) / math.comb(n - 1, k - 1)) / deviation
        assert values.tolist() == pytest.approx([right] * c + [wrong] * (n - c), abs=1e-9)


REWARDS = st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0, -1.0]), min_size=3, max_size=7)


@given(REWARDS, st.integers(2, 5), st.sampled_from(["mean", "others"]), st.sampled_from(["subsets", "none"]))
def test_pass_at_k_equals_the_enumeration_of_subsets(r: list[float], k: int, baseline: str, scale: str) -> None:
    values = pass_at_k(torch.tensor(r).double(), torch.zeros(len(r)).long(), k=k, baseline=baseline, scale=scale)
    subsets = list(itertools.combinations(range(len(r)), min(k, len(r))))
    best = [max(r[i] for i in subset) for subset in subsets]
    divisor = statistics.pstdev(best) + 1e-6 if scale == "subsets" else 1.0
    expected = []
    for i in range(len(r)):
        own = [s for s in subsets if i in s]
        less = [max(r[j] for j in s if j != i) for s in own] if baseline == "others" else best
        expected.append((statistics.mean(max(r[j] for j in s) for s in own) - statistics.mean(less)) / divisor)
    if len(set(r)) > 1:
        assert values.tolist() == pytest.approx(expected, abs=1e-6, rel=1e-6)
    else:
        assert (values == 0).all()


def test_pass_at_k_of_the_whole_group_is_the_lead_of_the_best() -> None:
    """verl's grpo_passk (arXiv:2503.19595): the best completion gets its lead over the second, over the deviation."""
    r = torch.tensor([0.2, 1.0, 0.7, NAN, 0.0]).double()
    values = pass_at_k(r, torch.zeros(5).long(), k=5, baseline="others", scale="group")
    assert values.tolist() == pytest.approx([0, 0.3 / (statistics.stdev([0.2, 1.0, 0.7, 0.0]) + 1e-6), 0, 0, 0])


def test_whole_numbers_are_rewards_like_others() -> None:
    rewards, groups = torch.tensor([1, 0, 0, 2]), torch.zeros(4).long()
    values = pass_at_k(rewards, groups, k=2)
    assert values.dtype == torch.get_default_dtype()
    torch.testing.assert_close(values, pass_at_k(rewards.float(), groups, k=2))


def test_pass_at_k_gives_exactly_zero_to_one_reward_alone_and_where_none_is() -> None:
    rewards, groups = torch.tensor([1.0, NAN, 0.5, 0.0, NAN, 0.2, 0.2]), torch.tensor([0, 2, 1, 0, 2, 3, 3])
    values = pass_at_k(rewards, groups, baseline="others", scale="none")
    assert values.tolist() == [1, 0, 0, 0, 0, 0, 0]
    assert values.dtype == torch.float32


@pytest.mark.parametrize(("best", "ties"), [(0.1, 2), (0.2, 2), (0.7, 3), (0.9, 2), (0.9, 3)])
def test_pass_at_k_is_zero_where_every_subset_has_one_of_the_best(best: float, ties: int) -> None:
    """Their variance, 0, is less than 0 by rounding."""
    rewards = torch.tensor([best] * ties + [0.0] * (5 - ties)).double()
    values = pass_at_k(rewards, torch.zeros(5).long(), k=6 - ties)
    assert values.tolist() == pytest.approx([0.0] * 5, abs=1e-9)


def test_raft_accepts_the_first_of_the_best_of_each_group() -> None:
    groups = torch.tensor([5, 2, 5, 2, 5, 2])
    rewards = torch.tensor([0.2, -1.0, 0.9, -0.5, 0.9, NAN])
    assert best_of_group(rewards, groups).tolist() == [0, 0, 1, 1, 0, 0]
    assert best_of_group(rewards, groups, threshold=0.0).tolist() == [0, 0, 1, 0, 0, 0]
    assert best_of_group(rewards, groups, threshold=0.9).tolist() == [0] * 6
    assert best_of_group(rewards, groups, accept="all", threshold=0.0).tolist() == [1, 0, 1, 0, 1, 0]
    assert best_of_group(torch.tensor([NAN, NAN]), torch.tensor([0, 0])).tolist() == [0, 0]


def test_raft_never_accepts_a_reward_at_the_threshold_nor_looks_at_missing_ones() -> None:
    rewards, groups = torch.tensor([NAN, 0.25, 0.5, 0.75]), torch.zeros(4).long()
    assert best_of_group(rewards, groups).tolist() == [0, 0, 0, 1]
    assert best_of_group(rewards, groups, threshold=0.75).tolist() == [0, 0, 0, 0]
    assert best_of_group(rewards, groups, accept="all", threshold=0.5).tolist() == [0, 0, 0, 1]
    for kind in (torch.float32, torch.float64):  # 0.1 in 32 bits is greater than in 64
        tenths = torch.tensor([0.1, 0.2], dtype=kind)
        assert best_of_group(tenths, torch.tensor([0, 0]), accept="all", threshold=0.1).tolist() == [0, 1]
    whole = best_of_group(torch.tensor([2, 1]), torch.tensor([0, 0]))
    assert whole.tolist() == [1, 0]
    assert whole.dtype == torch.float32


def _gradient(loss: Tensor, logprob: Tensor) -> list[float]:
    found: list[float] = torch.autograd.grad(loss.sum(), logprob)[0].tolist()
    return found


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_gmpo_clips_each_token_on_the_advantages_side_before_the_mean(sign: float) -> None:
    log_ratio = torch.tensor([0.6, -0.6, 0.1]).double()
    new, old = log_ratio.clone().requires_grad_(), torch.zeros(3).double()
    sequence, a = torch.zeros(3).long(), torch.full((3,), 2.0 * sign).double()
    loss = gmpo(new, old, a, sequence)
    bounded = [0.4, -0.6, 0.1] if sign > 0 else [0.6, -0.4, 0.1]
    mean = math.exp(sum(bounded) / 3)
    assert loss.tolist() == pytest.approx([-2 * sign * mean] * 3)
    clipped = [True, False, False] if sign > 0 else [False, True, False]
    assert gmpo_clipped(new, old, a).tolist() == clipped
    slopes = [0.0 if gone else -2 * sign * mean for gone in clipped]  # 3 tokens carry the value, each moves a third
    assert _gradient(loss, new) == pytest.approx(slopes)


def test_gmpo_equals_a_loop() -> None:
    """Log-ratios are eighths, so that some lie exactly on a bound; advantages may differ within a sequence."""
    bounds = {"clip_low": 0.25, "clip_high": 0.5}
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        new, old = -torch.randint(0, 8, (2, 12), generator=generator).double() / 8
        sequence, a = torch.arange(12) % 3, torch.randint(-2, 3, (12,), generator=generator).double() / 2
        rows = list(zip((new - old).tolist(), a.tolist(), sequence.tolist(), strict=True))
        bounded = [min(x, 0.5) if sign > 0 else max(x, -0.25) for x, sign, _ in rows]
        means = [sum(c for c, row in zip(bounded, rows, strict=True) if row[2] == i) / 4 for i in range(3)]
        expected = [-sign * math.exp(means[i]) for _, sign, i in rows]
        assert gmpo(new, old, a, sequence, **bounds).tolist() == pytest.approx(expected)
        gone = [(x > 0.5 and sign > 0) or (x < -0.25 and sign < 0) for x, sign, _ in rows]
        assert gmpo_clipped(new, old, a, **bounds).tolist() == gone


def test_gmpo_keeps_the_gradient_of_tokens_on_a_bound() -> None:
    new, old = torch.tensor([0.5, -0.25]).double().requires_grad_(), torch.zeros(2).double()
    for sign in (0.5, -0.5):
        loss = gmpo(new, old, torch.full((2,), sign).double(), torch.arange(2), clip_low=0.25, clip_high=0.5)
        assert _gradient(loss, new) == pytest.approx([-sign * math.exp(x) for x in (0.5, -0.25)])


def test_gmpo_without_clipping_is_gspo_without_clipping() -> None:
    new, old = torch.tensor([-1.0, -0.5, -2.0]).double(), torch.tensor([-1.3, -0.4, -1.9]).double()
    sequence, a = torch.tensor([0, 0, 1]), torch.tensor([1.0, 1.0, -1.0]).double()
    wide = {"clip_low": 9.0, "clip_high": 9.0}
    torch.testing.assert_close(gmpo(new, old, a, sequence, **wide), gspo(new, old, a, sequence, **wide))


def test_vespo_weighs_by_the_whole_completions_ratio() -> None:
    new = torch.tensor([-1.0, -1.0, -1.0, -1.0, -1.0]).double().requires_grad_()
    rollout = torch.tensor([-1.0 - math.log(2), -1.0, -1.0, -1.0 + math.log(2), -1.0]).double()
    sequence, a = torch.tensor([0, 0, 1, 1, 2]), torch.tensor([3.0, 3.0, -1.0, -1.0, 1.0]).double()
    positive, negative = 2**2 * math.exp(3 * (1 - 2)), 0.5**3 * math.exp(2 * (1 - 0.5))
    loss = vespo(new, rollout, a, sequence)
    weights = [3 * positive, 3 * positive, -negative, -negative, 1.0]
    assert loss.tolist() == pytest.approx(weights)  # -log pi is 1 everywhere
    assert _gradient(loss, new) == pytest.approx([-w for w in weights])


def test_vespo_takes_k_and_lambda_by_the_sign_of_the_advantage() -> None:
    new, old = torch.tensor([-0.5, -1.5]).double(), torch.tensor([-0.2, -2.0]).double()
    options = {"k_positive": 1.5, "lambda_positive": 2.5, "k_negative": 0.5, "lambda_negative": 1.0}
    for size, k, lam in ((0.5, 1.5, 2.5), (2.0, 1.5, 2.5), (-0.5, 0.5, 1.0), (-2.0, 0.5, 1.0), (0.0, 1.5, 2.5)):
        weight = (new - old).exp()
        expected = -(weight**k) * torch.exp(lam * (1 - weight)) * size * new
        got = vespo(new, old, torch.full((2,), size).double(), torch.arange(2), **options)
        torch.testing.assert_close(got, expected)


def test_vespos_weight_is_finite_however_far_the_policies_are_apart() -> None:
    for distance in (-500.0, 500.0):
        new = torch.full((2,), -1.0, requires_grad=True)
        loss = vespo(new, new.detach() - distance, torch.tensor([1.0, -1.0]), torch.tensor([0, 1]))
        assert loss.tolist() == [0, 0]
        assert _gradient(loss, new) == [0, 0]
