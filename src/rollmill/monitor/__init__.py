"""What a run shows and writes: metrics, rollouts, the terminal view, TensorBoard, summary and report."""

from rollmill.monitor.metrics import MetricsLog, read_metrics, wilson_interval
from rollmill.monitor.monitor import Monitor
from rollmill.monitor.report import write_report
from rollmill.monitor.rollouts import RolloutStore, iter_experiences, load_experiences, stored_steps
from rollmill.monitor.summary import peak_rss_mb, read_summary, write_summary
from rollmill.monitor.view import PlainView, View, make_view

__all__ = [
    "MetricsLog",
    "Monitor",
    "PlainView",
    "RolloutStore",
    "View",
    "iter_experiences",
    "load_experiences",
    "make_view",
    "peak_rss_mb",
    "read_metrics",
    "read_summary",
    "stored_steps",
    "wilson_interval",
    "write_report",
    "write_summary",
]
