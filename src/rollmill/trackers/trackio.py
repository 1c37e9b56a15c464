"""Writes metrics and sample completions for trackio (extra `trackio`)."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from typing import Any

from rollmill.config.trackers import TrackioSection
from rollmill.trackers.metrics_log import Metrics, TrackedRun, numbers
from rollmill.types import Experience


class TrackioTracker:
    """Logs to a run of trackio's local database, or of a Space; a resumed run continues it."""

    def __init__(self, config: TrackioSection, run: TrackedRun) -> None:
        import trackio

        with contextlib.redirect_stdout(io.StringIO()):  # it explains its dashboard there
            self._run: Any = trackio.init(
                project=config.project,
                name=run.folder.resolve().name,
                space_id=config.space,
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
