"""Predicts rollouts from engine steps: their number, their time, and the size of the KV cache.

Fits use least squares with non-negative coefficients, since more work cannot take less time.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from rollmill.apps.plan.planning.calibration import Calibration
from rollmill.apps.plan.planning.measurement import EngineStep
from rollmill.engines.native.kv_cache import MIN_CAPACITY, bucket_capacity_for, reserved_entries


def fit_nonnegative(rows: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """Coefficients c >= 0 that minimise sum_i (rows_i . c - values_i)^2 / values_i^2, relative errors.

    Tries all subsets of the few columns, so the result is exact (Lawson and Hanson 1974 search the same subsets).
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
    """Intercept and slope by `fit_nonnegative`, neither below 0; through the origin if all x are equal and not 0."""
    if len(set(x)) == 1:
        return (0.0, sum(y) / sum(x)) if x[0] else (sum(y) / len(y), 0.0)
    constant, slope = fit_nonnegative([(1.0, each) for each in x], y)
    return constant, slope


_OUTLIER = 3.0


@dataclass(frozen=True, slots=True)
class GroupLengths:
    """Prompt tokens of a task, and new tokens of each of its completions."""

    prompt: int
    lengths: Sequence[int]


@dataclass(frozen=True, slots=True)
class EngineStepCosts:
    """Seconds of an engine step, plus seconds per sampled token, per token attended to, and per prompt token."""

    step: float
    token: float
    attended: float
    prompt: float

    @classmethod
    def fitted(cls, passes: Sequence[EngineStep]) -> EngineStepCosts:
        """Fits the costs to measured steps, without outliers far above the fit, which were disturbed."""
        rows = [(1.0, one.tokens, one.attended, one.prompt) for one in passes]
        values = [one.seconds for one in passes]
        first = fit_nonnegative(rows, values)
        expected = [sum(a * b for a, b in zip(first, row, strict=True)) for row in rows]
        kept = [n for n, value in enumerate(values) if value < _OUTLIER * expected[n]]
        return cls(*fit_nonnegative([rows[n] for n in kept], [values[n] for n in kept]))

    def seconds(self, groups: Sequence[GroupLengths], max_sequences: int) -> float:
        """Seconds to roll these groups out."""
        lengths = [length for group in groups for length in group.lengths]
        attended = sum(group.prompt * length + length**2 / 2 for group in groups for length in group.lengths)
        prompts = sum(group.prompt for group in groups)
        steps = count_decode_steps(lengths, max_sequences)
        return self.step * steps + self.token * sum(lengths) + self.attended * attended + self.prompt * prompts


def count_decode_steps(lengths: Sequence[int], max_sequences: int) -> int:
    """Number of decode steps if at most `max_sequences` completions are decoded together, first come first served."""
    running: list[int] = []
    for length in lengths:
        began = heapq.heappop(running) if len(running) == max_sequences else 0
        heapq.heappush(running, began + length)
    return max(running, default=0)


def draw_groups(found: Calibration, count: int, seed: int) -> list[GroupLengths]:
    """Draws measured groups, with replacement.

    A completion truncated by the calibration's limit is extended: at every token it ends with the measured probability,
    at the latest at `max_new_tokens`.
    """
    source, longest = random.Random(seed), found.stage.rollout.max_new_tokens
    measured = [
        (prompt, lengths)
        for sample in found.samples
        for prompt, lengths in zip(sample.prompts, sample.lengths, strict=True)
    ]
    tokens = sum(sum(lengths) for _, lengths in measured)
    ended = sum(len(lengths) for _, lengths in measured) - sum(sample.cut for sample in found.samples)
    rate = ended / tokens if tokens else 1.0

    def whole(length: int) -> int:
        if length < found.longest or length >= longest:
            return length
        return longest if rate == 0 else min(longest, length + round(source.expovariate(rate)))

    drawn = [source.choice(measured) for _ in range(count)]
    return [GroupLengths(prompt, [whole(length) for length in lengths]) for prompt, lengths in drawn]


def reserved_cache_tokens(groups: Sequence[GroupLengths], max_sequences: int) -> int:
    """Number of tokens that the engine reserves cache for.

    Every bucket keeps its maximum size (engines/native/kv_cache.py). Completions move to larger buckets as they grow.
    """
    lengths = sorted((length for group in groups for length in group.lengths), reverse=True)[:max_sequences]
    together = max(1, max_sequences // max((len(group.lengths) for group in groups), default=1))
    prompts: dict[int, int] = {}
    for group in sorted(groups, key=lambda each: -each.prompt)[:together]:
        capacity = bucket_capacity_for(group.prompt)
        prompts[capacity] = prompts.get(capacity, 0) + 1
    total = sum(capacity * reserved_entries(count, capacity) for capacity, count in prompts.items())
    capacity, below = MIN_CAPACITY, 0
    while reaching := sum(length > below for length in lengths):
        total += capacity * reaching
        capacity, below = bucket_capacity_for(capacity + 1), capacity
    return total
