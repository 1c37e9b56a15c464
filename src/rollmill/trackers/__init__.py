"""Trackers of a run: metrics, rollouts, console, TensorBoard, heartbeats and the summary."""

from rollmill.trackers.metrics_log import (
    MetricsLog,
    TrackedRun,
    Tracker,
    peak_rss_mb,
    read_metrics,
    read_summary,
    wilson_interval,
    write_summary,
)
from rollmill.trackers.rollout_log import RolloutLog, iter_experiences, load_experiences, stored_steps
from rollmill.trackers.run_views import PlainView, RunView, make_view

__all__ = [
    "MetricsLog",
    "PlainView",
    "RolloutLog",
    "RunView",
    "TrackedRun",
    "Tracker",
    "iter_experiences",
    "load_experiences",
    "make_view",
    "peak_rss_mb",
    "read_metrics",
    "read_summary",
    "stored_steps",
    "wilson_interval",
    "write_summary",
]
