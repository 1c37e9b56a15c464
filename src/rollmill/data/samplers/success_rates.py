"""Per-task statistics: discounted successes and failures with the success rate, and skipping of uniform groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rollmill.config.samplers import SuccessRateSamplerSection
from rollmill.data.samplers.base import Bools, Floats, Ints, decode_array, encode_array
from rollmill.errors import TasksetError

_LEAST = 0.01
"""Smallest prior, because observations could not change a prior of 0 or 1."""


def build_success_tracker(
    section: SuccessRateSamplerSection, size: int, column: Callable[[str, str], Floats]
) -> SuccessTracker:
    """Build the tracker of a sampler; `column` returns the numbers of a column, for a key of the run file.

    Raises TasksetError if `prior_column` has numbers outside [0, 1].
    """
    priors = np.full(size, section.prior)
    if section.prior_column is not None:
        priors = column(section.prior_column, "sampler.prior_column")
        if priors.min() < 0 or priors.max() > 1:
            raise TasksetError(
                f"sampler.prior_column: success rates are from 0 to 1, and {section.prior_column} has numbers from "
                f"{priors.min():g} to {priors.max():g}; name another column"
            )
        priors = priors.clip(_LEAST, 1 - _LEAST)
    return SuccessTracker(priors, section.prior_weight, section.discount)


class SuccessTracker:
    """Tracks successes and failures of each task, [tasks], in completions; each new group discounts earlier ones.

    The rate is the mean of a Beta distribution: (prior * weight + successes) / (weight + successes + failures).

    Args:
        priors: success rate of a task without rollouts, [tasks].
        weight: weight of the prior, in completions.
        discount: factor applied to earlier groups for each new one.
    """

    def __init__(self, priors: Floats, weight: float, discount: float) -> None:
        self._priors, self._weight, self._discount = priors, weight, discount
        self.successes, self.failures = np.zeros(len(priors)), np.zeros(len(priors))
        self.groups: Ints = np.zeros(len(priors), np.int64)  #: number of observed groups

    def observe(self, number: int, successes: Sequence[float]) -> None:
        """Add a group of task `number`; success 0 to 1 of each completion."""
        right = float(sum(successes))
        self.successes[number] = self._discount * self.successes[number] + right
        self.failures[number] = self._discount * self.failures[number] + len(successes) - right
        self.groups[number] += 1

    def parameters(self) -> tuple[Floats, Floats]:
        """a and b of each task's Beta posterior."""
        prior = self._priors * self._weight
        return prior + self.successes, self._weight - prior + self.failures

    def rates(self) -> Floats:
        """Success rate of each task; the prior for tasks without rollouts."""
        a, b = self.parameters()
        rates: Floats = a / (a + b)
        return rates

    def metrics(self) -> dict[str, float]:
        """Share of tasks with rollouts, and their mean success rate."""
        seen = self.groups > 0
        rate = {"tasks/success": float(self.rates()[seen].mean())} if seen.any() else {}
        return {"tasks/seen": float(seen.mean()), **rate}

    def state_dict(self) -> dict[str, Any]:
        """State as plain JSON, exact."""
        return {
            "successes": encode_array(self.successes),
            "failures": encode_array(self.failures),
            "groups": encode_array(self.groups),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.successes = decode_array(state["successes"], np.float64)
        self.failures = decode_array(state["failures"], np.float64)
        self.groups = decode_array(state["groups"], np.int64)


class UniformGroupSkipper:
    """Skips a task for `epochs` epochs if all completions of its last group were equally successful.

    The advantages of such a group are 0 (zero-variance skipping).
    """

    def __init__(self, size: int, epochs: int) -> None:
        self.epochs = epochs
        self._until = np.zeros(size if epochs else 0, np.int64)  # first epoch in which the task is not skipped

    def observe(self, number: int, successes: Sequence[float], epoch: int) -> None:
        """Add a group of task `number`, observed in `epoch`."""
        if self.epochs and len(successes) > 1:
            uniform = min(successes) == max(successes)
            self._until[number] = epoch + 1 + self.epochs if uniform else 0

    def due(self, epoch: int) -> Bools | None:
        """Mask of the tasks that are not skipped, [tasks]; None for all."""
        return self._until <= epoch if self.epochs and self._until.max() > epoch else None

    def first(self) -> int:
        """First epoch in which some task is not skipped."""
        return int(self._until.min())

    def soonest(self, among: Bools | None) -> Bools:
        """Mask of the tasks in `among` whose skipping ends first, [tasks]."""
        until = self._until if among is None else np.where(among, self._until, np.iinfo(np.int64).max)
        soonest: Bools = until == until.min()
        return soonest

    def metrics(self, epoch: int) -> dict[str, float]:
        """Share of tasks that are skipped."""
        due = self.due(epoch)
        return {"tasks/skipped": 0.0 if due is None else float(1 - due.mean())} if self.epochs else {}

    def state_dict(self) -> dict[str, Any]:
        """State as plain JSON; empty if skipping is off."""
        return {"until": encode_array(self._until)} if self.epochs else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.epochs:
            self._until = decode_array(state["until"], np.int64)
