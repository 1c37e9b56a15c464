"""Trackers and views of a run, behind one object for the orchestrator."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import rollmill.trackers.metrics_log as metrics_file
import rollmill.trackers.rollout_log as rollouts
from rollmill.config.monitor import MonitorConfig
from rollmill.config.trackers import ServiceTrackerSection, TrackerSection
from rollmill.errors import ConfigError, RollmillError
from rollmill.files import explain_write_errors, sync
from rollmill.plugins import call_hook
from rollmill.registry import build_component
from rollmill.trackers.background import BackgroundTracker
from rollmill.trackers.console import Stages
from rollmill.trackers.event_log import INCIDENT, STUCK, record_event
from rollmill.trackers.metric_names import add_names
from rollmill.trackers.metrics_log import Metrics, MetricsLog, TrackedRun, Tracker, read_metrics, write_summary
from rollmill.trackers.rollout_log import RolloutLog
from rollmill.trackers.run_views import RunView
from rollmill.trackers.step_timeline import TIMELINE_FILE, drop_steps_after, write_step_timeline
from rollmill.trackers.trace import Span
from rollmill.types import Experience
from rollmill.waiting import OUTAGES


class Monitor:
    """Shows a run, writes its metrics, rollouts, summary and report, and passes metrics to trackers.

    Metrics are flat mappings with an integer `step` that counts over all stages (0 before the first); `stages` are
    names and planned steps. Methods raise RollmillError when a file cannot be written.
    """

    def __init__(self, run_dir: Path, run_name: str, stages: Stages, config: MonitorConfig, view: RunView) -> None:
        self._run_dir = run_dir
        self._config = config
        self._view = view
        self._log = MetricsLog(run_dir / metrics_file.METRICS_FILE)
        self._store = RolloutLog(run_dir / rollouts.ROLLOUTS_FOLDER)
        self._run_name = run_name
        self._trackers: dict[str, tuple[TrackerSection, Tracker]] | None = None
        view.start(run_name, stages)

    def resume_at(self, step: int) -> None:
        """Resume after `step`: records of later steps are dropped, as the run repeats these steps."""
        self._log.truncate_after(step)
        self._store.drop_after(step)
        drop_steps_after(self._run_dir, step)
        self._close_trackers()
        self.open_trackers(step)
        self._view.resume(read_metrics(self._run_dir))

    def sync(self) -> None:
        """Flush the records of all steps so far to the disk, so that they survive a power failure."""
        self._log.sync()
        self._store.sync()
        with explain_write_errors(self._run_dir):
            for path in (self._run_dir / TIMELINE_FILE, self._run_dir):
                if path.exists():
                    sync(path)

    def message(self, text: str) -> None:
        """Show the user a message."""
        self._view.message(text)

    def incident(self, text: str) -> None:
        """Show the user a failure that does not end the run, and record it for the report."""
        self.message(text)
        self._record(INCIDENT, text=text)

    def stuck(self, text: str, step: int) -> None:
        """Warn the user that the run learns nothing, in lines that stand out, and record it for the report."""
        self.message(f"{'=' * 20} WARNING at step {step} {'=' * 20}\n{text}\n{'=' * 60}")
        self._record(STUCK, step=step, text=text)

    def recorded(self) -> list[dict[str, Any]]:
        """Return the metrics of all steps so far."""
        return read_metrics(self._run_dir)

    def _record(self, event: str, **details: Any) -> None:
        try:
            record_event(self._run_dir, event, **details)
        except RollmillError as error:
            self.message(f"this is not recorded: {error}")

    def showing_outages(self) -> AbstractContextManager[None]:
        """Inside, show and record outages of services and their ends, and lost processes; called in the event loop."""
        loop = asyncio.get_running_loop()

        def show(text: str) -> None:
            with suppress(RuntimeError):  # the loop has just been closed
                loop.call_soon_threadsafe(self.incident, text)

        return OUTAGES.listening(show)

    def step(
        self, metrics: Metrics, experiences: Sequence[Experience], began: float = 0.0, spans: Sequence[Span] = ()
    ) -> None:
        """Record a training step: the `experiences` it trained on, and the `spans` since it `began`."""
        step = metrics["step"]
        assert isinstance(step, int)
        self._log.append(metrics)
        if step % self._config.rollouts_every == 0:
            self._store.write(step, experiences, details=self._config.token_details)
        if spans and (step == 1 or step % self._config.timeline_every == 0):
            write_step_timeline(self._run_dir, dict(metrics), began, spans)
        self._track(metrics, experiences)
        self._view.step(metrics, experiences)

    def evaluation(self, metrics: Metrics) -> None:
        """Record an evaluation. Its metrics are merged into those of its step, in either order."""
        self._log.append(metrics)
        self._track(metrics)
        self._view.evaluation(metrics)

    def close(self, summary: Mapping[str, Any] | None = None) -> None:
        """Close all files. With a `summary`, write it, and the report unless disabled.

        Without one (a run that failed) the terminal and the files are only released.
        """
        self._view.close()
        self._log.close()
        self._close_trackers()
        if summary is not None:
            write_summary(self._run_dir, summary)
            if self._config.report:
                call_hook("write_run_report", self._run_dir)

    def open_trackers(self, resumed_after: int | None = None) -> None:
        """Open the trackers, unless they are open; the first record opens them at the latest.

        Raises what a tracker raises. When a run resumes, one that cannot be opened is only reported, so that a service
        that is unavailable does not keep the run from going on.
        """
        if self._trackers is not None:
            return
        run = TrackedRun(self._run_dir, self._run_name, resumed_after)
        opened: dict[str, tuple[TrackerSection, Tracker]] = {}
        for each in self._config.all_trackers():
            count = sum(known.partition("#")[0] == each.name for known in opened)
            try:
                if isinstance(each, ServiceTrackerSection):
                    build = partial(build_component, each, run)
                    tracker: Tracker = BackgroundTracker(build, completions=each.completions)
                else:
                    tracker = build_component(each, run)
            except Exception as error:
                if resumed_after is None or isinstance(error, ConfigError):
                    raise
                self._report_failure(each.name, error)
                continue
            opened[f"{each.name}#{count + 1}" if count else each.name] = (each, tracker)
        self._trackers = opened

    def _track(self, metrics: Metrics, experiences: Sequence[Experience] = ()) -> None:
        self.open_trackers()
        for name, (section, tracker) in list((self._trackers or {}).items()):
            self._call_tracker(name, partial(tracker.write, add_names(metrics, section.names), experiences))

    def _close_trackers(self) -> None:
        for name, (_, tracker) in list((self._trackers or {}).items()):
            self._call_tracker(name, tracker.close)
        self._trackers = None

    def _call_tracker(self, name: str, call: Callable[[], None]) -> None:
        """Call a tracker. One that fails is not called again, and the run goes on: metrics.jsonl has everything."""
        try:
            call()
        except (Exception, SystemExit) as error:  # a service may be unavailable, and a user's code may raise anything
            assert self._trackers is not None
            del self._trackers[name]
            self._report_failure(name, error)

    def _report_failure(self, name: str, error: BaseException) -> None:
        self._view.message(f"tracker `{name}` failed and is not used any more: {type(error).__name__}: {error}")
