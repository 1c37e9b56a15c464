"""Thompson sampling of the tasks that are neither too easy nor too hard."""

from __future__ import annotations

import numpy as np

from rollmill.config.order import PosteriorOrder
from rollmill.data.samplers.base import Bools, Floats
from rollmill.data.samplers.batch_sampler import BatchSampler
from rollmill.data.taskset import Taskset


class PosteriorSampler(BatchSampler):
    """A success rate is drawn from each task's Beta posterior; the tasks whose draw is nearest to `order.target` come.

    Tasks that were seldom rolled out have wide posteriors, so that they come often enough to be known.
    """

    def __init__(self, taskset: Taskset, order: PosteriorOrder, seed: int, batch: int) -> None:
        super().__init__(taskset, order, seed, batch)
        self._target = order.target

    def _eligible(self, step: int) -> Bools | None:
        return None

    def _keys(self, random: np.random.Generator) -> Floats:
        return np.abs(random.beta(*self._success.parameters()) - self._target)
