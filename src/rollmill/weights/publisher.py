"""New weights for engines in other processes: sent whole, then announced."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from rollmill.engines.base import RolloutEngine
from rollmill.weights.base import WeightSender


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
