"""Tasks with chances in proportion to weights: 1 - success rate (Kimi k1.5, arXiv:2501.12599), or a user's."""

from __future__ import annotations

from abc import abstractmethod

import numpy as np

from rollmill.config.order import PrioritisedOrder
from rollmill.data.samplers.base import Bools, Floats
from rollmill.data.samplers.batch_sampler import BatchSampler
from rollmill.data.taskset import Taskset


class WeightedSampler(BatchSampler):
    """Successive draws without replacement within a batch, by exponential keys (Efraimidis and Spirakis, 2006)."""

    @abstractmethod
    def _weights(self) -> Floats:
        """A weight of at least 0 for each task, [tasks]."""

    def _eligible(self, step: int) -> Bools | None:
        return None

    def _keys(self, random: np.random.Generator) -> Floats:
        with np.errstate(divide="ignore"):  # a weight of 0 comes last
            keys: Floats = random.standard_exponential(self._size) / self._weights()
        return keys


class PrioritisedSampler(WeightedSampler):
    """P(task) proportional to 1 - its success rate, but at least `order.floor`."""

    def __init__(self, taskset: Taskset, order: PrioritisedOrder, seed: int, batch: int) -> None:
        super().__init__(taskset, order, seed, batch)
        self._floor = order.floor

    def _weights(self) -> Floats:
        weights: Floats = np.maximum(1 - self._success.rates(), self._floor)
        return weights
