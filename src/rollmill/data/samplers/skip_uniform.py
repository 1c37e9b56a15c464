"""Tasks that are left out for a while, because all completions of their last group were equally successful.

Such a group teaches nothing: its advantages are 0 (zero-variance skipping).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rollmill.data.samplers.base import Bools, decode_array, encode_array


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
