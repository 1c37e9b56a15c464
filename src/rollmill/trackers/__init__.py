"""Trackers of a run: metrics, rollouts, console, TensorBoard, heartbeats and the summary."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollmill.trackers.metrics_log import MetricsLog as MetricsLog
    from rollmill.trackers.metrics_log import TrackedRun as TrackedRun
    from rollmill.trackers.metrics_log import Tracker as Tracker
    from rollmill.trackers.metrics_log import peak_rss_mb as peak_rss_mb
    from rollmill.trackers.metrics_log import read_metrics as read_metrics
    from rollmill.trackers.metrics_log import read_summary as read_summary
    from rollmill.trackers.metrics_log import wilson_interval as wilson_interval
    from rollmill.trackers.metrics_log import write_summary as write_summary
    from rollmill.trackers.rollout_log import RolloutLog as RolloutLog
    from rollmill.trackers.rollout_log import iter_experiences as iter_experiences
    from rollmill.trackers.rollout_log import load_experiences as load_experiences
    from rollmill.trackers.rollout_log import stored_steps as stored_steps
    from rollmill.trackers.run_views import PlainView as PlainView
    from rollmill.trackers.run_views import RunView as RunView
    from rollmill.trackers.run_views import make_view as make_view

_HOMES = {
    "MetricsLog": "metrics_log",
    "PlainView": "run_views",
    "RolloutLog": "rollout_log",
    "RunView": "run_views",
    "TrackedRun": "metrics_log",
    "Tracker": "metrics_log",
    "iter_experiences": "rollout_log",
    "load_experiences": "rollout_log",
    "make_view": "run_views",
    "peak_rss_mb": "metrics_log",
    "read_metrics": "metrics_log",
    "read_summary": "metrics_log",
    "stored_steps": "rollout_log",
    "wilson_interval": "metrics_log",
    "write_summary": "metrics_log",
}


def __getattr__(name: str) -> Any:
    """Import the names on first use: the configuration searches this package for trackers, and needs none of them."""
    if name not in _HOMES:
        raise AttributeError(f"module 'rollmill.trackers' has no attribute '{name}'")
    return getattr(import_module(f"rollmill.trackers.{_HOMES[name]}"), name)
