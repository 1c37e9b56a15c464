"""Masks over whole optimizer steps, KL-Cov and the adaptive entropy coefficient: numbers worked out by hand."""

from __future__ import annotations

import math
import statistics

import pytest
import torch

from rollmill.algorithms.entropy import (
    TIE_TOLERANCE,
    AdaptiveEntropy,
    clip_b,
    clip_cov,
    clip_v,
    covariance,
    discriminant,
    high_entropy,
    kl_cov,
    largest_covariance,
)
from rollmill.algorithms.trust_region import second_moment


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def drawn(seed: int, n: int = 12) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probs, entropies and advantages, of which some are 0 and some small."""
    generator = torch.Generator().manual_seed(seed)
    p, entropy = torch.rand(2, n, generator=generator, dtype=torch.float64)
    return p.log(), 2 * entropy, torch.randint(-2, 3, (n,), generator=generator) / 2.0


def test_the_fifth_with_the_highest_entropy_is_kept_and_ties_stay_together() -> None:
    entropy = torch.arange(10.0)  # the .8 quantile is 7.2
    assert high_entropy(entropy).tolist() == [False] * 8 + [True] * 2
    assert high_entropy(entropy, top=1.0).all()
    tied = torch.tensor([0.1, 2.0, 2.0 - 2e-7, 2.0 + 2e-7, 0.2])
    assert high_entropy(tied, top=0.25).tolist() == [False, True, True, True, False]
    assert high_entropy(torch.zeros(0)).tolist() == []


def test_the_threshold_of_the_entropy_has_its_tolerance_and_the_precision_of_float64() -> None:
    assert high_entropy(tensor(1 - TIE_TOLERANCE, 1, 2), top=0.5).tolist() == [True, True, True]
    assert high_entropy(tensor(1 - 1.1 * TIE_TOLERANCE, 1, 2), top=0.5).tolist() == [False, True, True]
    # .6 times 210 is 126: in float32 a little more, which puts the quantile between 1 and 6.
    entropy = torch.cat([torch.zeros(126), torch.ones(1), torch.full((84,), 6.0)])
    assert high_entropy(entropy, top=0.4).tolist() == [False] * 126 + [True] * 85


def test_the_discriminant_is_the_derivative_of_the_entropy_by_the_tokens_logit() -> None:
    """Theorem 3.2 of arXiv:2602.03392: raising the logit by e changes the entropy by -e S."""
    logits = torch.tensor([0.3, -0.2, 0.5], dtype=torch.float64, requires_grad=True)
    log_p = torch.log_softmax(logits, -1)
    entropy = -(log_p.exp() * log_p).sum()
    (slope,) = torch.autograd.grad(entropy, logits)
    torch.testing.assert_close(discriminant(log_p, entropy).detach(), -slope)


def test_clip_b_drops_punished_tokens_far_below_the_mean_alone() -> None:
    p = tensor(0.05, 0.05, 0.5, 0.5, 0.5, 0.5)
    entropy = tensor(0.5, 0.5, 0.7, 0.7, 0.7, 0.7)
    s = [x * (h + math.log(x)) for x, h in zip(p.tolist(), entropy.tolist(), strict=True)]
    assert s[0] < s[2]
    # Two of six lie (s2 - s0) 2/3 below the mean; the standard deviation is (s2 - s0) sqrt(2)/3: sqrt(2) of them.
    signs = tensor(-1, 1, -1, 1, -1, 0)
    assert clip_b(p.log(), entropy, signs, mu=1.41).tolist() == [False] + [True] * 5
    assert clip_b(p.log(), entropy, signs, mu=1.42).all()


def test_clip_b_equals_a_loop() -> None:
    for seed in range(30):
        logprob, entropy, advantage = drawn(seed)
        s = [math.exp(x) * (h + x) for x, h in zip(logprob.tolist(), entropy.tolist(), strict=True)]
        bound = statistics.fmean(s) - 0.8 * statistics.pstdev(s)
        kept = [a >= 0 or x >= bound for x, a in zip(s, advantage.tolist(), strict=True)]
        assert clip_b(logprob, entropy, advantage, mu=0.8).tolist() == kept


def test_clip_v_equals_a_loop() -> None:
    for seed in range(60):
        logprob, entropy, advantage = drawn(seed)
        expected = drawn(1000 + seed)[1] - 0.5
        rows = zip(logprob.tolist(), entropy.tolist(), expected.tolist(), strict=True)
        d = [e - math.exp(x) * (h + x) for x, h, e in rows]
        beyond = [i for i, a in enumerate(advantage.tolist()) if a < 0 and d[i] > 0.9 * statistics.pstdev(d)]
        dropped = sorted(beyond, key=lambda i: -d[i])[:2]  # .2 of 12
        kept = clip_v(logprob, entropy, expected, advantage, mu=0.9, max_share=0.2)
        assert (~kept).nonzero()[:, 0].tolist() == sorted(dropped)


def test_tokens_that_are_all_alike_stay() -> None:
    """A deviation of 0, which nothing exceeds. Tokens of probability 1 have an S of 0."""
    zero = tensor(0, 0, 0)
    assert clip_b(zero, zero, zero - 1).all()
    assert clip_v(zero, zero, zero, zero - 1).all()


def test_bounds_in_deviations_have_the_precision_of_float64() -> None:
    """S or D of 0 and 1, whose deviation is .5; a bound just below what float32 can tell from the difference."""
    zero, one = torch.zeros(2), torch.tensor([0.0, 1.0])
    assert clip_b(zero, one, zero - 1, mu=1 - 1e-9).tolist() == [False, True]
    assert clip_b(zero, one, zero - 1, mu=1 + 1e-9).all()
    assert clip_v(zero, zero, one, zero - 1, mu=2 - 1e-9).tolist() == [True, False]
    assert clip_v(zero, zero, one, zero - 1, mu=2 + 1e-9).all()


def test_clip_v_drops_the_greatest_differences_up_to_its_share() -> None:
    p, entropy = tensor(0.5, 0.5, 0.5, 0.5), tensor(0.7, 0.7, 0.7, 0.7)
    expected = tensor(0.9, 0.5, 0.0, 0.8) + discriminant(p.log(), entropy)  # so D is .9, .5, 0, .8; its deviation .354
    signs = tensor(-1, -1, -1, 1)
    assert clip_v(p.log(), entropy, expected, signs, mu=1.0, max_share=1.0).tolist() == [False, False, True, True]
    assert clip_v(p.log(), entropy, expected, signs, mu=1.0, max_share=0.3).tolist() == [False, True, True, True]
    assert clip_v(p.log(), entropy, expected, signs, mu=1.0, max_share=0.0).tolist() == [False, True, True, True]
    assert clip_v(p.log(), entropy, expected, signs, mu=3.0, max_share=1.0).all()


LP, A = tensor(-1, -2, -3, -6), tensor(1, 1, -1, -1)  # means -3 and 0: covariances 2, 1, 0, 3


def test_covariances_are_about_the_means_of_the_step() -> None:
    assert covariance(LP, A).tolist() == [2, 1, 0, 3]
    assert largest_covariance(LP, A).tolist() == [False, False, False, True]
    assert largest_covariance(LP, A, share=0.6).tolist() == [True, False, False, True]


def test_covariances_equal_a_loop_in_float64() -> None:
    logprob, _, advantage = (x.float() for x in drawn(0))
    lp, a = logprob.tolist(), (3 * advantage + 0.7).tolist()
    expected = [(x - statistics.fmean(lp)) * (y - statistics.fmean(a)) for x, y in zip(lp, a, strict=True)]
    found = covariance(logprob, torch.tensor(a))
    torch.testing.assert_close(found, tensor(*expected), rtol=1e-12, atol=1e-12)


def test_of_no_tokens_none_are_selected() -> None:
    assert largest_covariance(torch.zeros(0), torch.zeros(0)).shape == (0,)
    assert largest_covariance(LP, A, share=2.0).all()


def test_clip_cov_draws_among_tokens_inside_the_bounds_that_are_not_clipped() -> None:
    none, draw = torch.zeros(4, dtype=torch.bool), tensor(0.3, 0.1, 0.0, 0.2)
    assert clip_cov(LP, A, none, draw, low=0.5, high=5.0).tolist() == [True, False, True, True]
    assert clip_cov(LP, A, none, draw, low=1.0, high=5.0).tolist() == [True, True, True, False], "bounds are exclusive"
    assert clip_cov(LP, A, none, draw, low=0.5, high=5.0, share=0.5).tolist() == [True, False, True, False]
    assert clip_cov(LP, A, none, draw, low=0.5, high=2.0, share=1.0).tolist() == [True, False, True, True]
    clipped = torch.tensor([False, True, False, True])
    assert clip_cov(LP, A, clipped, draw, low=0.5, high=5.0, share=1.0).tolist() == [False, True, True, True]
    assert clip_cov(LP, A, none, draw, low=7.0, high=8.0).all(), "without a candidate nothing is left out"


def test_kl_cov_penalises_the_selected_tokens() -> None:
    new, old = tensor(-1, -1, -1).requires_grad_(), tensor(-1.2, -0.9, -0.7)
    selected = torch.tensor([True, False, True])
    terms = kl_cov(new, old, tensor(2, 2, 2), selected, coefficient=0.5)
    ratio = [2 * math.exp(x) for x in (0.2, -0.1, -0.3)]
    assert terms.tolist() == pytest.approx([-ratio[0] + 0.5 * 0.2, -ratio[1], -ratio[2] + 0.5 * 0.3])
    (gradient,) = torch.autograd.grad(terms.sum(), new)
    assert gradient.tolist() == pytest.approx([-ratio[0] + 0.5, -ratio[1], -ratio[2] - 0.5])


def test_the_second_moment_is_brought_below_its_threshold() -> None:
    log_ratio = tensor(0.1, 0.5, 0.3, -0.4, -0.2, -0.9)
    signs = tensor(1, 1, -1, -1, -1, 1)  # pushed further away: .1, .5, -.4 and -.2; their squares .01, .25, .16, .04
    zero = torch.zeros(6, dtype=torch.float64)
    assert second_moment(log_ratio, zero, signs, threshold=0.1151).all()  # (.01 + .25 + .16 + .04) / 4
    assert second_moment(log_ratio, zero, signs, threshold=0.1).tolist() == [True, False, True, True, True, True]
    assert second_moment(log_ratio, zero, signs).tolist() == [True, False, True, False, True, True]
    assert second_moment(log_ratio, zero, signs, threshold=0.0).tolist() == [False, False, True, False, False, True]
    assert second_moment(zero, zero, signs).all()


def test_the_second_moment_equals_a_loop() -> None:
    """Log-ratios are eighths, some of them 0, so that the arithmetic is exact. Of equal ones the later goes first."""
    for seed in range(30):
        generator = torch.Generator().manual_seed(seed)
        new, old = torch.randint(-4, 1, (2, 12), generator=generator).double() / 8
        advantage = torch.randint(-2, 3, (12,), generator=generator) / 2.0
        square = ((new - old) ** 2).tolist()
        left = [i for i in range(12) if (new - old)[i] * advantage[i] > 0]
        left.sort(key=lambda i: (square[i], i))
        dropped = set[int]()
        while left and sum(square[i] for i in left) / len(left) > 0.05:
            dropped.add(left.pop())
        kept = second_moment(new, old, advantage, threshold=0.05).tolist()
        assert kept == [i not in dropped for i in range(12)]


def test_of_equal_log_ratios_the_second_moment_drops_the_later_ones() -> None:
    """(20 * .01 + 12 * .09) / 32 = .04."""
    log_ratio = tensor(*[0.1, 0.3] * 20)
    kept = second_moment(log_ratio, torch.zeros(40), torch.ones(40), threshold=0.0401)
    assert kept.tolist() == [True] * 24 + [True, False] * 8


def test_the_second_moment_is_taken_in_float64() -> None:
    """(1 + 2^-12)^2 = 1 + 2^-11 + 2^-24, whose last part float32 does not hold."""
    kept = second_moment(torch.tensor([1 + 2**-12]), torch.zeros(1), torch.ones(1), threshold=1 + 2**-11)
    assert kept.tolist() == [False]


def test_the_entropy_coefficient_counts_from_the_first_step() -> None:
    assert AdaptiveEntropy(0.3, target=0.2, delta=0.005, maximum=0.5).weight == 0.3


def test_the_entropy_coefficient_rises_below_the_target_and_counts_only_there() -> None:
    control = AdaptiveEntropy(0.0, target=0.2, delta=0.005, maximum=0.012)
    weights = [control.weight]
    for entropy in (0.3, 0.2, 0.1, 0.1, 0.1, 0.4, 0.1):
        control.update(entropy)
        weights.append(control.weight)
    assert weights == pytest.approx([0.0, 0.0, 0.005, 0.01, 0.012, 0.012, 0.0, 0.012])
    for entropy, weight in ((0.1, 0.012), (0.5, 0.0)):
        control.update(entropy)
        other = AdaptiveEntropy(0.0, target=0.2, delta=0.005, maximum=0.012)
        other.load_state_dict(control.state_dict())
        assert other.weight == control.weight == pytest.approx(weight)
    for each in (control, other):
        each.update(0.0)
    assert other.weight == control.weight == pytest.approx(0.012)
