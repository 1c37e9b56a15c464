"""Writes metrics and sample completions for trackio (extra `trackio`)."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import PrivateAttr

from rollmill.config.trackers import ServiceTrackerSection
from rollmill.trackers.metrics_log import Metrics, TrackedRun, numbers
from rollmill.types import Experience


class TrackioTracker(ServiceTrackerSection):
    """trackio (extra `trackio`), which stores runs in a local database; `trackio show` opens its dashboard."""

    needs_extra = ("trackio", "trackio")
    name: Literal["trackio"] = "trackio"
    project: str = "rollmill"
    """Project that the run belongs to."""
    space: str | None = None
    """Hugging Face Space that shows the run, such as `user/space`. Default: only the local database."""
    _run: Any = PrivateAttr()

    def setup(self, run: TrackedRun) -> None:
        import trackio

        with contextlib.redirect_stdout(io.StringIO()):  # it explains its dashboard there
            self._run = trackio.init(
                project=self.project,
                name=run.folder.resolve().name,
                space_id=self.space,
                config=run.settings(),
                resume="allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )

    def write(self, metrics: Metrics, experiences: Sequence[Experience] = ()) -> None:
        """Log the numbers of a step, and its first completions as a table."""
        row: dict[str, Any] = numbers(metrics)
        if experiences:
            from trackio import Table

            rows = [[each.prompt, each.response, each.reward] for each in experiences]
            row["completions"] = Table(columns=["prompt", "completion", "reward"], data=rows)
        step = metrics["step"]
        self._run.log(row, step=step)

    def close(self) -> None:
        """Write what is left and end the run."""
        with contextlib.redirect_stdout(io.StringIO()):
            self._run.finish()
