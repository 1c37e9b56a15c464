"""Optimal one-to-one matching between reference and predicted boxes or points."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Matrix = npt.NDArray[np.float64]


def max_detections(golds: int) -> int:
    """Return the maximum number of predictions: with more, F1 is close to 0, and matching is slow."""
    return 100 + 3 * golds


def max_matching_score(scores_GP: Matrix) -> float:
    """Return the greatest sum of pair scores, each row and column in at most one pair. Scores are 0 or above."""
    scores = scores_GP[scores_GP.any(1)][:, scores_GP.any(0)]
    if not scores.size:
        return 0.0
    scores = scores if scores.shape[0] <= scores.shape[1] else scores.T
    columns = solve_assignment(-scores)
    return float(scores[np.arange(len(columns)), columns].sum())


def f1_score(matched: float, golds: int, found: int) -> float:
    """Return the harmonic mean of matched / found and matched / golds; 1 if both are empty."""
    return 2 * matched / (golds + found) if golds + found else 1.0


def labels_match(golds: Sequence[str | None], labels: Sequence[str | None]) -> npt.NDArray[np.bool_]:
    """[G, P]: whether the labels are equal up to case and spaces. A reference without a label matches any."""
    folded = [
        [None if each is None else " ".join(each.casefold().split()) for each in side] for side in (golds, labels)
    ]
    return np.array([[gold is None or gold == label for label in folded[1]] for gold in folded[0]], bool).reshape(
        len(golds), len(labels)
    )


def solve_assignment(cost_NM: Matrix) -> npt.NDArray[np.int64]:
    """Return the column [N] of each row with the least sum of costs, N <= M.

    Shortest augmenting paths (the Hungarian method): for each row, find a path of least reduced cost to a free column,
    and exchange the pairs along it (Kuhn 1955; Jonker and Volgenant 1987). O(N^2 M).
    """
    rows, columns = cost_NM.shape
    assert rows <= columns
    row_price, column_price = np.zeros(rows + 1), np.zeros(columns + 1)
    owner = np.full(columns + 1, -1)  # the last column stands for "not assigned yet"
    before = np.full(columns + 1, columns)
    for row in range(rows):
        owner[columns], column = row, columns
        distance, done = np.full(columns + 1, np.inf), np.zeros(columns + 1, bool)
        while owner[column] >= 0:
            done[column] = True
            reduced = cost_NM[owner[column]] - row_price[owner[column]] - column_price[:-1]
            closer = ~done[:-1] & (reduced < distance[:-1])
            distance[:-1][closer], before[:-1][closer] = reduced[closer], column
            open_distance = np.where(done, np.inf, distance)
            nearest = int(open_distance[:-1].argmin())
            step = distance[nearest]
            row_price[owner[done]] += step
            column_price[done] -= step
            distance[~done] -= step
            column = nearest
        while column != columns:
            owner[column] = owner[before[column]]
            column = int(before[column])
    found = np.empty(rows, np.int64)
    taken = np.flatnonzero(owner[:-1] >= 0)
    found[owner[taken]] = taken
    return found
