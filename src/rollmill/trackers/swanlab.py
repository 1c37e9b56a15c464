"""Sends metrics and sample completions to SwanLab (extra `swanlab`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollmill.config.trackers import SwanLabSection
from rollmill.trackers.metrics_log import Metrics, TrackedRun, numbers
from rollmill.types import Experience


class SwanLabTracker:
    """Logs to a run of SwanLab. Online, a resumed run continues it; offline, it starts a new one."""

    def __init__(self, config: SwanLabSection, run: TrackedRun) -> None:
        import swanlab

        key = f"swanlab/{config.project}"
        known = run.service_id(key) if config.mode == "online" else None
        self._run: Any = swanlab.init(
            project=config.project,
            workspace=config.workspace,
            name=run.folder.resolve().name,
            mode=config.mode,
            log_dir=str(run.folder / "swanlog"),
            id=known,
            resume=None if known is None else "allow",
            config=run.settings(),
        )
        if config.mode == "online":
            run.keep_service_id(key, self._run.id)

    def write(self, metrics: Metrics, experiences: Sequence[Experience] = ()) -> None:
        """Log the numbers of a step, and its first completions as text."""
        step = metrics["step"]
        assert isinstance(step, int)
        from swanlab import Text

        row: dict[str, Any] = numbers(metrics)
        for index, each in enumerate(experiences):
            text = f"{each.prompt}\n--- completion, reward {each.reward}\n{each.response}"
            row[f"completion/{index}"] = Text(text)
        self._run.log(row, step=step)

    def close(self) -> None:
        """Upload what is left and end the run."""
        self._run.finish()
