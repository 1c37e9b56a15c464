"""Estimators from n samples per task: pass@k, maj@k, and confidence intervals for samples clustered by task."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from statistics import NormalDist

import numpy as np

from rollmill.trackers.metrics_log import wilson_interval

Votes = Sequence[tuple[str | None, bool]]
"""For each sample, the answer it votes for (None: it abstains), and whether it was correct."""

_FLIPS = 10_000
_ALL_FLIPS = 13  # number of differences up to which every assignment of signs is tried


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Probability that one of k samples is correct: 1 - C(n - c, k) / C(n, k), unbiased (Chen et al. 2021, eq. 1).

    Computed with integers, so that it is exact for every n.
    """
    assert 0 <= correct <= n
    assert 1 <= k <= n
    every = math.comb(n, k)
    return (every - math.comb(n - correct, k)) / every


def maj_at_k(votes: Votes, k: int) -> float:
    """Probability that a vote of k of the n samples elects a correct answer, over all subsets of size k.

    Ties are shared: each of t answers with most votes is elected with probability 1/t. An answer's correctness is the
    share of its samples that were correct, which is 0 or 1 if the reward depends only on the answer. Without votes,
    nothing is elected. Exact: see `_elected`.
    """
    assert 1 <= k <= len(votes)
    answers: dict[str, list[bool]] = {}
    for answer, correct in votes:
        if answer is not None:
            answers.setdefault(answer, []).append(correct)
    classes = sorted((len(each), sum(each)) for each in answers.values())
    return _elected(tuple(classes), len(votes), k)


@lru_cache(maxsize=4096)
def _elected(classes: tuple[tuple[int, int], ...], n: int, k: int) -> float:
    """`maj_at_k` for answers of (samples, correct samples).

    For every winning number of votes v, counts all choices class by class: ways[j, t] with j samples drawn and t
    answers that have v votes, and good[j, t], the same weighted by how many of the t are correct.
    """
    silent = n - sum(size for size, _ in classes)
    whole = math.lcm(*(size for size, _ in classes))  # makes all shares integers, which are fast
    total = Fraction(0)
    for votes in range(1, min(k, max((size for size, _ in classes), default=0)) + 1):
        ways: dict[tuple[int, int], int] = {(j, 0): math.comb(silent, j) for j in range(min(silent, k) + 1)}
        good: dict[tuple[int, int], int] = {}
        for size, correct in classes:
            ways, good = _with_class(ways, good, size, whole // size * correct, votes, k)
        total += sum((Fraction(value, t) for (j, t), value in good.items() if j == k and t), Fraction(0))
    return float(total / (whole * math.comb(n, k)))


def _with_class(
    ways: dict[tuple[int, int], int],
    good: dict[tuple[int, int], int],
    size: int,
    share: int,
    votes: int,
    k: int,
) -> tuple[dict[tuple[int, int], int], dict[tuple[int, int], int]]:
    new_ways: dict[tuple[int, int], int] = {}
    new_good: dict[tuple[int, int], int] = {}
    for drawn in range(min(size, votes) + 1):
        wins, choices = int(drawn == votes), math.comb(size, drawn)
        for (j, t), count in ways.items():
            if j + drawn <= k:
                at = (j + drawn, t + wins)
                new_ways[at] = new_ways.get(at, 0) + count * choices
                weighted = (good.get((j, t), 0) + wins * share * count) * choices
                if weighted:
                    new_good[at] = new_good.get(at, 0) + weighted
    return new_ways, new_good


@dataclass(frozen=True, slots=True)
class IntervalEstimate:
    """A mean over tasks with its 95 % confidence interval."""

    value: float
    low: float
    high: float


def mean_over_tasks(values: Sequence[float], samples: int = 1) -> IntervalEstimate:
    """Mean of estimates between 0 and 1, one per task, with a confidence interval for the population of tasks.

    Wilson's interval for the number of independent trials with the same variance: p (1 - p) / (s^2 / tasks), with s^2
    the variance between tasks (the effective sample size of clustered samples; Franco et al. 2019, J. Surv. Stat.
    Methodol. 7(3)). With one sample per task it is Wilson's interval. Unlike a bootstrap interval, it has a width even
    if all tasks agree.

    Args:
        samples: per task; the number of trials is at least the number of tasks and at most that of all samples.
    """
    tasks, mean = len(values), float(np.mean(values))
    spread, error = mean * (1 - mean), float(np.var(values)) / len(values)
    trials = float(tasks)
    if error > 1e-12 and spread > 1e-12:
        trials = min(max(spread / error, float(tasks)), float(tasks * samples))
    return IntervalEstimate(mean, *wilson_interval(mean * trials, trials))


@dataclass(frozen=True, slots=True)
class PairedDifference:
    """Mean difference of paired values, its 95 % confidence interval, and the p-value of no difference."""

    value: float
    low: float
    high: float
    p: float


def paired_difference(one: Sequence[float], other: Sequence[float]) -> PairedDifference:
    """Difference between two lists of values of the same tasks: `other` minus `one`.

    The interval is the mean plus or minus 1.96 standard errors of the differences (Miller 2024, arXiv:2411.00640, eq.
    7). p is Fisher's sign-flip test, exact for few differences, else from 10 000 random assignments of signs.
    """
    differences = np.asarray(other, float) - np.asarray(one, float)
    mean, n = float(differences.mean()), len(differences)
    error = float(differences.std(ddof=1)) / math.sqrt(n) if n > 1 else 0.0
    z = NormalDist().inv_cdf(0.975)
    return PairedDifference(mean, mean - z * error, mean + z * error, _sign_flips(differences))


def _sign_flips(differences: np.ndarray) -> float:
    moved = differences[differences != 0]
    observed, n = abs(float(moved.sum())), len(moved)
    if n <= _ALL_FLIPS:
        signs = np.array([[1 - 2 * (number >> bit & 1) for bit in range(n)] for number in range(2**n)], float)
        return float(np.mean(np.abs(signs.reshape(2**n, n) @ moved) >= observed - 1e-9))
    random, sums = np.random.default_rng(0), np.zeros(_FLIPS)
    for size, count in zip(*np.unique(np.abs(moved), return_counts=True), strict=True):  # equal sizes at once
        sums += size * (2 * random.binomial(count, 0.5, _FLIPS) - count)
    extreme = int(np.sum(np.abs(sums) >= observed - 1e-9))
    return (extreme + 1) / (_FLIPS + 1)  # the observed signs are one of the assignments (Phipson and Smyth 2010)
