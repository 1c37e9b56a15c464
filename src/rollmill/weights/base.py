"""How weights travel from the trainer to who decodes with them: what all transports have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor


class WeightPublisher(Protocol):
    """Brings the trainer's weights to engines, whatever the way."""

    def publish(self, version: int) -> None:
        """The trainer's parameters are now those of `version`: later tokens are sampled from them."""

    def close(self) -> None:
        """Release what was allocated."""


class WeightSender(Protocol):
    """The trainer's side."""

    def send(self, version: int, weights: Mapping[str, Tensor]) -> None:
        """Make `weights` available as `version`, whole or not at all.

        Raises:
            WeightSyncError: they are not what was announced, or cannot be written.
            DeadlineError: a receiver holds on to what has to be overwritten.
        """

    def close(self) -> None:
        """Release what was allocated."""


class WeightReceiver(Protocol):
    """The engine's side. It names tensors as the sender does; types may differ, shapes may not."""

    def newest(self) -> int | None:
        """The newest version that is whole; None before the first."""

    def receive(self, into: Mapping[str, Tensor]) -> int:
        """Copy the newest version into tensors; its number.

        Raises:
            WeightSyncError: the weights are damaged, or do not fit `into`.
            DeadlineError: none came.
        """

    def close(self) -> None:
        """Release what was mapped."""
