"""pass@k, maj@k and intervals: golden values, brute force over subsets, and coverage."""

from __future__ import annotations

from itertools import combinations
from statistics import mean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmill.trackers.estimators import maj_at_k, mean_over_tasks, paired_difference, pass_at_k
from rollmill.trackers.metrics_log import wilson_interval


@pytest.mark.parametrize(
    ("n", "correct", "k", "expected"),
    [
        (10, 3, 1, 0.3),
        (10, 3, 5, 11 / 12),
        (10, 0, 4, 0.0),
        (10, 10, 4, 1.0),
        (4, 1, 4, 1.0),
        (5, 4, 2, 1.0),
    ],
)
def test_pass_at_k_is_that_of_the_paper(n: int, correct: int, k: int, expected: float) -> None:
    assert pass_at_k(n, correct, k) == pytest.approx(expected, abs=1e-15)


def test_pass_at_k_is_exact_where_floats_would_overflow() -> None:
    assert pass_at_k(20_000, 1, 10_000) == 0.5
    assert pass_at_k(1000, 1, 1) == 0.001


@given(st.lists(st.booleans(), min_size=1, max_size=9), st.data())
def test_pass_at_k_counts_the_subsets_with_a_correct_sample(samples: list[bool], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(samples)))
    subsets = [any(each) for each in combinations(samples, k)]
    assert pass_at_k(len(samples), sum(samples), k) == pytest.approx(mean(subsets), abs=1e-12)


def brute_force(votes: list[tuple[str | None, bool]], k: int) -> float:
    """The vote of every subset, one by one; ties are shared, and an answer is as correct as its samples are."""
    right = {
        answer: mean(correct for other, correct in votes if other == answer)
        for answer, _ in votes
        if answer is not None
    }
    elected = []
    for subset in combinations(votes, k):
        counts = {answer: sum(other == answer for other, _ in subset) for answer in right}
        most = max(counts.values(), default=0)
        winners = [answer for answer, count in counts.items() if count == most and most > 0]
        elected.append(mean(right[each] for each in winners) if winners else 0.0)
    return mean(elected)


VOTES = st.lists(st.tuples(st.sampled_from(["a", "b", "c", "d", None]), st.booleans()), min_size=1, max_size=8)


@given(VOTES, st.data())
def test_maj_at_k_is_the_mean_over_all_subsets(votes: list[tuple[str | None, bool]], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(votes)))
    assert maj_at_k(votes, k) == pytest.approx(brute_force(votes, k), abs=1e-12)


def test_votes_of_known_results() -> None:
    votes = [("7", True)] * 3 + [("5", False)] * 2 + [(None, False)]
    assert maj_at_k(votes, 6) == 1.0  # 3 against 2
    assert maj_at_k(votes, 1) == 0.5  # one sample's accuracy: 3 of 6
    assert maj_at_k([("7", True), ("5", False)], 2) == 0.5  # a tie is shared
    assert maj_at_k([(None, False)] * 3, 2) == 0.0
    assert maj_at_k([("7", True)] * 40 + [("5", False)] * 24, 64) == 1.0


@given(st.integers(1, 40), st.data())
def test_one_sample_per_task_has_wilson_s_interval(tasks: int, data: st.DataObject) -> None:
    solved = data.draw(st.integers(0, tasks))
    found = mean_over_tasks([1.0] * solved + [0.0] * (tasks - solved))
    assert (found.low, found.high) == pytest.approx(wilson_interval(solved, tasks), abs=1e-9)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=30), st.integers(1, 16))
def test_intervals_enclose_the_mean(values: list[float], samples: int) -> None:
    found = mean_over_tasks(values, samples)
    assert 0 <= found.low <= found.value + 1e-9
    assert found.value - 1e-9 <= found.high <= 1
    narrow, wide = found.high - found.low, mean_over_tasks([round(each) for each in values])
    assert narrow <= 1.0
    assert wide.high > wide.low


def test_intervals_cover_the_truth_when_samples_of_a_task_go_together() -> None:
    """95 % intervals of clustered samples: the rate of a task is uniform, so the true mean is 0.5."""
    dice, covered, naive = np.random.default_rng(0), 0, 0
    for _ in range(1000):
        rates = dice.uniform(size=40)
        correct = dice.binomial(16, rates)
        found = mean_over_tasks(list(correct / 16), 16)
        covered += found.low <= 0.5 <= found.high
        low, high = wilson_interval(int(correct.sum()), 40 * 16)
        naive += low <= 0.5 <= high
    assert 920 <= covered <= 985
    assert naive < 700  # samples taken for independent ones


def test_paired_differences() -> None:
    found = paired_difference([0.0, 0.5, 1.0, 0.25], [0.5, 1.0, 1.0, 0.5])
    assert found.value == pytest.approx(0.3125)
    assert found.p == 0.25  # all three that moved went up: 2 of 2^3 assignments are as extreme
    assert paired_difference([0.5, 0.5], [0.5, 0.5]).p == 1.0
    ones, dice = np.ones(60), np.random.default_rng(1)
    assert paired_difference(list(0 * ones), list(ones)).p < 0.001
    none = [paired_difference(list(dice.uniform(size=30)), list(dice.uniform(size=30))).p for _ in range(40)]
    assert sum(each < 0.05 for each in none) <= 6
