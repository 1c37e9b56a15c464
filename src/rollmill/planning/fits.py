"""Least squares with coefficients that are not negative: what work takes cannot fall when there is more of it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np


def fit_nonnegative(rows: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """Coefficients c >= 0 that minimise sum_i (rows_i . c - values_i)^2 / values_i^2, relative errors.

    With few columns all sets of them are tried; the set is exact (Lawson and Hanson 1974 search among the same sets).
    """
    x, y = np.asarray(rows, np.float64), np.asarray(values, np.float64)
    weights = 1 / np.maximum(y, 1e-9 + 1e-3 * y.max(initial=0.0))
    x, y = x * weights[:, None], y * weights
    best, best_error = np.zeros(x.shape[1]), float(y @ y)
    for count in range(1, x.shape[1] + 1):
        for chosen in map(list, combinations(range(x.shape[1]), count)):
            found, _, rank, _ = np.linalg.lstsq(x[:, chosen], y, rcond=1e-9)
            error = float(np.sum((x[:, chosen] @ found - y) ** 2))
            if rank == count and (found >= 0).all() and error < best_error * (1 - 1e-9):
                best, best_error = np.zeros(x.shape[1]), error
                best[chosen] = found
    return [float(each) for each in best]


def fit_line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Intercept and slope of `fit`, neither below 0; through the origin where all x are the same and not 0."""
    if len(set(x)) == 1:
        return (0.0, sum(y) / sum(x)) if x[0] else (sum(y) / len(y), 0.0)
    constant, slope = fit_nonnegative([(1.0, each) for each in x], y)
    return constant, slope
