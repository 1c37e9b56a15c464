"""Sends metrics and sample completions to SwanLab (extra `swanlab`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import PrivateAttr

from rollmill.config.trackers import ServiceTrackerSection
from rollmill.trackers.metrics_log import Metrics, TrackedRun, numbers
from rollmill.types import Experience


class SwanLabTracker(ServiceTrackerSection):
    """SwanLab (extra `swanlab`). Files are in RUN/swanlog."""

    needs_extra = ("swanlab", "swanlab")
    name: Literal["swanlab"] = "swanlab"
    project: str = "rollmill"
    """Project that the run belongs to."""
    workspace: str | None = None
    """Workspace. Default: that of the API key."""
    mode: Literal["online", "offline"] = "online"
    """`offline` only writes RUN/swanlog, which `swanlab sync` uploads later."""
    _run: Any = PrivateAttr()

    def setup(self, run: TrackedRun) -> None:
        """Open the run. Online, a resumed run continues it; offline, it starts a new one."""
        import swanlab

        key = f"swanlab/{self.project}"
        known = run.service_id(key) if self.mode == "online" else None
        self._run = swanlab.init(
            project=self.project,
            workspace=self.workspace,
            name=run.folder.resolve().name,
            mode=self.mode,
            log_dir=str(run.folder / "swanlog"),
            id=known,
            resume=None if known is None else "allow",
            config=run.settings(),
        )
        if self.mode == "online":
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
