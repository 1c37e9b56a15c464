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


def test_raft_accepts_the_first_of_the_best_of_each_group() -> None:
    groups = torch.tensor([5, 2, 5, 2, 5, 2])
    rewards = torch.tensor([0.2, -1.0, 0.9, -0.5, 0.9, NAN])
    assert best_of_group(rewards, groups).tolist() == [0, 0, 1, 1, 0, 0]
    assert best_of_group(rewards, groups, threshold=0.0).tolist() == [0, 0, 1, 0, 0, 0]
    assert best_of_group(rewards, groups, threshold=0.9).tolist() == [0] * 6
    assert best_of_group(rewards, groups, accept="all", threshold=0.0).tolist() == [1, 0, 1, 0, 1, 0]
    assert best_of_group(torch.tensor([NAN, NAN]), torch.tensor([0, 0])).tolist() == [0, 0]


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


def test_vespos_weight_is_finite_however_far_the_policies_are_apart() -> None:
    for distance in (-500.0, 500.0):
        new = torch.full((2,), -1.0, requires_grad=True)
        loss = vespo(new, new.detach() - distance, torch.tensor([1.0, -1.0]), torch.tensor([0, 1]))
        assert loss.tolist() == [0, 0]
        assert _gradient(loss, new) == [0, 0]
