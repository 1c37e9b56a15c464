"""The engine decodes with the trainer's own parameters: publishing a version moves nothing."""

from __future__ import annotations

from rollmill.engines.base import RolloutEngine


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
