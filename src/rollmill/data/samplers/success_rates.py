"""What is known of each task: its discounted successes and failures, and the success rate that follows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rollmill.config.order import SuccessRateOrder
from rollmill.data.samplers.base import Bools, Floats, Ints, decode_array, encode_array
from rollmill.errors import TasksetError

_LEAST = 0.01
"""A prior of 0 or 1 would never be doubted."""


def build_success_tracker(order: SuccessRateOrder, size: int, column: Callable[[str, str], Floats]) -> SuccessTracker:
    """What an order tracks; `column` gives the numbers of a column, for a key of the run file.

    Raises TasksetError where `prior_column` has numbers that are no success rates.
    """
    priors = np.full(size, order.prior)
    if order.prior_column is not None:
        priors = column(order.prior_column, "order.prior_column")
        if priors.min() < 0 or priors.max() > 1:
            raise TasksetError(
                f"order.prior_column: success rates are from 0 to 1, and {order.prior_column} has numbers from "
                f"{priors.min():g} to {priors.max():g}; name another column"
            )
        priors = priors.clip(_LEAST, 1 - _LEAST)
    return SuccessTracker(priors, order.prior_weight, order.discount)


class SuccessTracker:
    """Successes and failures of each task, [tasks], in completions; each new group discounts what was before.

    The rate is the mean of a Beta distribution: (prior * weight + successes) / (weight + successes + failures).

    Args:
        priors: success rate of a task that was never rolled out, [tasks].
        weight: how many completions the prior is worth.
        discount: factor of earlier groups, each time a new one comes.
    """

    def __init__(self, priors: Floats, weight: float, discount: float) -> None:
        self._priors, self._weight, self._discount = priors, weight, discount
        self.successes, self.failures = np.zeros(len(priors)), np.zeros(len(priors))
        self.groups: Ints = np.zeros(len(priors), np.int64)  #: how many were observed

    def observe(self, number: int, successes: Sequence[float]) -> None:
        """Take in a group of task `number`; success 0 to 1 of each completion."""
        right = float(sum(successes))
        self.successes[number] = self._discount * self.successes[number] + right
        self.failures[number] = self._discount * self.failures[number] + len(successes) - right
        self.groups[number] += 1

    def parameters(self) -> tuple[Floats, Floats]:
        """a and b of each task's Beta posterior."""
        prior = self._priors * self._weight
        return prior + self.successes, self._weight - prior + self.failures

    def rates(self) -> Floats:
        """Success rate of each task; the prior where nothing was seen."""
        a, b = self.parameters()
        rates: Floats = a / (a + b)
        return rates

    def metrics(self) -> dict[str, float]:
        """Share of tasks that were seen, and their mean rate."""
        seen = self.groups > 0
        rate = {"tasks/success": float(self.rates()[seen].mean())} if seen.any() else {}
        return {"tasks/seen": float(seen.mean()), **rate}

    def state_dict(self) -> dict[str, Any]:
        """As plain JSON, exact."""
        return {
            "successes": encode_array(self.successes),
            "failures": encode_array(self.failures),
            "groups": encode_array(self.groups),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of `state_dict`."""
        self.successes = decode_array(state["successes"], np.float64)
        self.failures = decode_array(state["failures"], np.float64)
        self.groups = decode_array(state["groups"], np.int64)


# Tasks that are left out for a while, because all completions of their last group were equally successful.
#
# Such a group teaches nothing: its advantages are 0 (zero-variance skipping).


class UniformGroupSkipper:
    """Since when each of `size` tasks is left out: until `epochs` epochs after the one in which it was observed."""

    def __init__(self, size: int, epochs: int) -> None:
        self.epochs = epochs
        self._until = np.zeros(size if epochs else 0, np.int64)  # first epoch in which the task comes again

    def observe(self, number: int, successes: Sequence[float], epoch: int) -> None:
        """Take in a group of task `number`, observed in `epoch`."""
        if self.epochs and len(successes) > 1:
            uniform = min(successes) == max(successes)
            self._until[number] = epoch + 1 + self.epochs if uniform else 0

    def due(self, epoch: int) -> Bools | None:
        """Which tasks are not left out, [tasks]; None: all."""
        return self._until <= epoch if self.epochs and self._until.max() > epoch else None

    def first(self) -> int:
        """The first epoch in which some task is not left out."""
        return int(self._until.min())

    def soonest(self, among: Bools | None) -> Bools:
        """Which tasks, of those in `among`, come again first, [tasks]."""
        until = self._until if among is None else np.where(among, self._until, np.iinfo(np.int64).max)
        soonest: Bools = until == until.min()
        return soonest

    def metrics(self, epoch: int) -> dict[str, float]:
        """Share of tasks that are left out."""
        due = self.due(epoch)
        return {"tasks/skipped": 0.0 if due is None else float(1 - due.mean())} if self.epochs else {}

    def state_dict(self) -> dict[str, Any]:
        """As plain JSON; nothing where nothing is ever left out."""
        return {"until": encode_array(self._until)} if self.epochs else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of `state_dict`."""
        if self.epochs:
            self._until = decode_array(state["until"], np.int64)
