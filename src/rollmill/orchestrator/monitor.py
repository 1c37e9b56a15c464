"""Trackers and views of a run, behind one object for the orchestrator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import rollmill.trackers.metrics_log as metrics_file
import rollmill.trackers.rollout_log as rollouts
from rollmill.config.run import MonitorConfig
from rollmill.report.run_report import write_report
from rollmill.report.step_timeline import drop_steps_after, write_step_timeline
from rollmill.trackers.console import RunView, Stages
from rollmill.trackers.metrics_log import Metrics, MetricsLog, read_metrics, write_summary
from rollmill.trackers.rollout_log import RolloutLog
from rollmill.trackers.tensorboard import TensorBoardWriter
from rollmill.trackers.trace import Span
from rollmill.types import Experience


class Monitor:
    """Shows a run and writes its metrics, rollouts, TensorBoard events, summary and report.

    Metrics are flat mappings with an integer `step` that counts over all stages (0 before the first); `stages` are
    names and planned steps. Methods raise RollmillError when a file cannot be written.
    """

    def __init__(self, run_dir: Path, run_name: str, stages: Stages, config: MonitorConfig, view: RunView) -> None:
        self._run_dir = run_dir
        self._config = config
        self._view = view
        self._log = MetricsLog(run_dir / metrics_file.METRICS_FILE)
        self._store = RolloutLog(run_dir / rollouts.ROLLOUTS_FOLDER)
        self._tensorboard = self._open_tensorboard(None)
        view.start(run_name, stages)

    def resume_at(self, step: int) -> None:
        """Resume after `step`: records of later steps are dropped, as the run repeats these steps."""
        self._log.truncate_after(step)
        self._store.drop_after(step)
        drop_steps_after(self._run_dir, step)
        if self._tensorboard is not None:
            self._tensorboard.close()
            self._tensorboard = self._open_tensorboard(step)
        self._view.resume(read_metrics(self._run_dir))

    def message(self, text: str) -> None:
        """Show the user a message."""
        self._view.message(text)

    def step(
        self, metrics: Metrics, experiences: Sequence[Experience], began: float = 0.0, spans: Sequence[Span] = ()
    ) -> None:
        """Record a training step: the `experiences` it trained on, and the `spans` since it `began`."""
        step = metrics["step"]
        assert isinstance(step, int)
        self._log.append(metrics)
        if step % self._config.rollouts_every == 0:
            self._store.write(step, experiences)
        if spans and (step == 1 or step % self._config.timeline_every == 0):
            write_step_timeline(self._run_dir, dict(metrics), began, spans)
        if self._tensorboard is not None:
            self._tensorboard.write(metrics, experiences)
        self._view.step(metrics, experiences)

    def evaluation(self, metrics: Metrics) -> None:
        """Record an evaluation. Its metrics are merged into those of its step, in either order."""
        self._log.append(metrics)
        if self._tensorboard is not None:
            self._tensorboard.write(metrics)
        self._view.evaluation(metrics)

    def close(self, summary: Mapping[str, Any] | None = None) -> None:
        """Close all files. With a `summary`, write it, and the report unless disabled.

        Without one (a run that failed) the terminal and the files are only released.
        """
        self._view.close()
        self._log.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
        if summary is not None:
            write_summary(self._run_dir, summary)
            if self._config.report:
                write_report(self._run_dir)

    def _open_tensorboard(self, resumed_after: int | None) -> TensorBoardWriter | None:
        if not self._config.tensorboard:
            return None
        return TensorBoardWriter(self._run_dir / "tensorboard", self._config.show_completions, resumed_after)
