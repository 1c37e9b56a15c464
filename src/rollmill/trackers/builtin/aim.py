"""Sends metrics and sample completions to Aim (extra `aim`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import PrivateAttr

from rollmill.config.trackers import ServiceTrackerSection
from rollmill.trackers.metrics_log import Metrics, TrackedRun, numbers
from rollmill.types import Experience


class AimTracker(ServiceTrackerSection):
    """Aim (extra `aim`), which stores runs in a repository on this machine or on a server; `aim up` opens its pages.
    A resumed run continues the same run there."""

    needs_extra = ("aim", "aim")
    name: Literal["aim"] = "aim"
    repo: str | None = None
    """Folder of the repository, or `aim://HOST:PORT`. Default: Aim's own, the nearest folder with `.aim` from the
    working folder upwards, or the working folder."""
    experiment: str = "rollmill"
    """Experiment that the run belongs to."""
    _run: Any = PrivateAttr()

    def setup(self, run: TrackedRun) -> None:
        import aim

        key = f"aim/{self.repo or 'default'}"
        known = run.service_id(key)
        self._run = aim.Run(
            known,
            repo=self.repo,
            experiment=self.experiment,
            force_resume=known is not None,  # a killed run has left its lock
            system_tracking_interval=None,
            capture_terminal_logs=False,
        )
        run.keep_service_id(key, self._run.hash)
        self._run.name = run.folder.resolve().name
        self._run.set("run_file", run.settings(), strict=False)

    def write(self, metrics: Metrics, experiences: Sequence[Experience] = ()) -> None:
        """Track the numbers of a step, and its first completions as text. A repeated step replaces the earlier one."""
        from aim import Text

        step = metrics["step"]
        for name, value in numbers(metrics).items():
            self._run.track(value, name=name, step=step)
        for index, each in enumerate(experiences):
            text = f"{each.prompt}\n--- completion, reward {each.reward}\n{each.response}"
            self._run.track(Text(text), name=f"completion/{index}", step=step)

    def close(self) -> None:
        """Write what is left and end the run."""
        self._run.close()
