"""Weight publishing: brings the trainer's weights to engines and announces the version.

`InPlacePublisher` serves engines that share the trainer's parameters, `TransferPublisher` those in a process of
their own. `remote/rollouts.py` sends weights to explorers in other processes.
`WeightSender` and `WeightReceiver` are the interfaces of all transports.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from rollmill.engines.base import RolloutEngine
    from rollmill.weights.cuda_ipc import IPCSender


class WeightPublisher(Protocol):
    """Brings the trainer's weights to engines."""

    def publish(self, version: int) -> None:
        """Publishes the trainer's current parameters as `version`; later tokens are sampled from them."""

    def close(self) -> None:
        """Releases allocated resources."""


class WeightSender(Protocol):
    """The trainer's side of a transport."""

    def send(self, version: int, weights: Mapping[str, Tensor], readers: IPCSender | None = None) -> None:
        """Makes `weights` available as `version`, atomically; they may be ShardedWeights.

        Args:
            readers: has offered the version to engines, which get it bucket by bucket meanwhile.

        Raises:
            WeightSyncError: they do not match the announced layout, or cannot be written.
            DeadlineError: a receiver holds what would be overwritten, and there is no room beside it.
        """

    def restore(self) -> None:
        """Makes the last version available again if its files were removed."""

    def close(self) -> None:
        """Releases allocated resources."""


class WeightReceiver(Protocol):
    """The engine's side of a transport. Tensor names and shapes match the sender's; types may differ."""

    def newest(self) -> int | None:
        """The newest complete version; None before the first."""

    def fetch(self) -> None:
        """Brings the newest version into this process, for `receive`, in a thread while the engine goes on.

        Raises:
            WeightSyncError: the weights are damaged, or the sender is gone.
            DeadlineError: none arrived in time.
        """

    def receive(self, into: Mapping[str, Tensor]) -> int:
        """Copies the newest version into tensors and returns its number.

        Raises:
            WeightSyncError: the weights are damaged, or do not match `into`.
            DeadlineError: none arrived in time.
        """

    def close(self) -> None:
        """Releases mapped memory."""


class TransferPublisher:
    """Sends the trainer's weights and notifies engines.

    Args:
        weights: returns the current weights by name.
        ipc: offers versions to the engine's processes, if the weights are on a GPU.
    """

    def __init__(
        self,
        sender: WeightSender,
        weights: Callable[[], Mapping[str, Tensor]],
        engine: RolloutEngine,
        ipc: IPCSender | None = None,
    ) -> None:
        self._sender, self._weights, self._engine, self._ipc = sender, weights, engine, ipc

    def publish(self, version: int) -> None:
        """Sends the trainer's parameters as `version`. Raises WeightSyncError or DeadlineError; see WeightSender."""
        weights, ipc = self._weights(), self._ipc
        runs = getattr(self._engine, "pid", None) is not None  # else it loads the version when it starts
        if ipc is not None and runs and ipc.offer(version, weights, ["vLLM"]):
            self._engine.weights_updated(version)
            self._sender.send(version, weights, ipc)
            return
        self._sender.send(version, weights)
        self._engine.weights_updated(version)

    def close(self) -> None:
        self._sender.close()
        if self._ipc is not None:
            self._ipc.close()


class InPlacePublisher:
    """Notifies engines that share the trainer's parameters; nothing is copied.

    Args:
        gather: brings what engines share up to date before, where several ranks hold parts of the parameters.
    """

    def __init__(self, *engines: RolloutEngine, gather: Callable[[], None] = lambda: None) -> None:
        self._engines, self._gather = engines, gather

    def publish(self, version: int) -> None:
        self._gather()
        for engine in self._engines:
            engine.weights_updated(version)

    def close(self) -> None:
        """No-op: nothing was allocated."""
