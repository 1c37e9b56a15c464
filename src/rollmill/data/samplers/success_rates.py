"""What is known of each task: its discounted successes and failures, and the success rate that follows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rollmill.config.order import SuccessRateOrder
from rollmill.data.samplers.base import Floats, Ints, decode_array, encode_array
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
