"""New weights for engines in other processes: sent whole, then announced."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from torch import Tensor

from rollmill.engines.base import RolloutEngine

# How weights travel from the trainer to who decodes with them: what all transports have in common.


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


class TransferPublisher:
    """Sends the trainer's weights and tells engines that they are there.

    Args:
        weights: gives them by name, as they are now.
    """

    def __init__(
        self, sender: WeightSender, weights: Callable[[], Mapping[str, Tensor]], *engines: RolloutEngine
    ) -> None:
        self._sender, self._weights, self._engines = sender, weights, engines

    def publish(self, version: int) -> None:
        """Send the trainer's parameters as `version`. Raises WeightSyncError or DeadlineError; see WeightSender."""
        self._sender.send(version, self._weights())
        for engine in self._engines:
            engine.weights_updated(version)

    def close(self) -> None:
        """Release what the sender has allocated."""
        self._sender.close()


# The engine decodes with the trainer's own parameters: publishing a version moves nothing.


class InPlacePublisher:
    """Tells engines of the same process that the parameters they share have changed."""

    def __init__(self, *engines: RolloutEngine) -> None:
        self._engines = engines

    def publish(self, version: int) -> None:
        """The trainer's parameters are now those of `version`."""
        for engine in self._engines:
            engine.weights_updated(version)

    def close(self) -> None:
        """Nothing was allocated."""
