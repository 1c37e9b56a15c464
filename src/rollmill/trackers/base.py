"""The tracker protocol."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rollmill.trackers.metrics_log import Metrics
from rollmill.types import Experience


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """The run that a tracker follows. Steps after `resumed_after` are repeated, where it is given."""

    folder: Path
    name: str
    resumed_after: int | None = None


class Tracker(Protocol):
    """Receives the metrics of a run. It is built from a `TrackedRun`, and again when the run resumes."""

    def write(self, metrics: Metrics, experiences: Sequence[Experience] = ()) -> None:
        """Record the numbers of a step or an evaluation by their names, and the experiences it trained on.

        `metrics["step"]` counts over all stages; metrics of one step may come in several calls.
        """
        ...

    def close(self) -> None:
        """Flush and close."""
        ...
