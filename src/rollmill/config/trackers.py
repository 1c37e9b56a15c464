"""Base classes of trackers, places for metrics besides the run directory. They stand in `rollmill.trackers`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from rollmill.config.section import NamedSection

if TYPE_CHECKING:
    from rollmill.trackers.metrics_log import Metrics, TrackedRun
    from rollmill.types import Experience


class TrackerSection(NamedSection):
    """A tracker chosen by name: its options, and the methods of a `rollmill.trackers.Tracker`. A run uses a copy."""

    names: Literal["rollmill", "trl", "verl"] = "rollmill"
    """Whose names the metrics get: `trl` and `verl` add those of TRL or verl to rollmill's own."""

    def arguments(self) -> dict[str, Any]:
        """Returns the options of the tracker itself."""
        return {key: value for key, value in super().arguments().items() if key != "names"}

    def setup(self, run: TrackedRun) -> None:
        """Open the tracker for a run. Raises ConfigError if its service refuses that."""
        raise NotImplementedError

    def write(self, metrics: Metrics, experiences: Sequence[Experience] = ()) -> None:
        """Record the numbers of a step, and its first completions."""
        raise NotImplementedError

    def close(self) -> None:
        """Flush and close."""
        raise NotImplementedError


class ServiceTrackerSection(TrackerSection):
    """A tracker of a service, which may be slow or unavailable, so that it runs in a thread of its own."""

    completions: int = Field(0, ge=0)
    """Number of sample completions to write as text at every step."""
