"""What a run shows while it goes on: a live terminal view, or plain lines when nobody watches."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Protocol, TextIO

from rollmill.trackers.eval_metrics import accuracies
from rollmill.trackers.metrics_log import Metric, Metrics
from rollmill.trackers.printable import one_line, printable
from rollmill.trackers.progress import RunProgress, Stages
from rollmill.types import Experience

_SHOWN = {
    "reward/mean": "reward",
    "loss": "loss",
    "pairs/accuracy": "accuracy",
    "kl": "kl",
    "entropy": "entropy",
    "grad_norm": "grad_norm",
    "length/mean": "length",
}


class RunView(Protocol):
    """Shows a run. Calls come from one thread; `metrics` has the keys of metrics.jsonl."""

    def start(self, run_name: str, stages: Stages) -> None:
        """The run begins; `stages` are names and planned steps."""

    def resume(self, history: Sequence[Metrics]) -> None:
        """The run goes on after the steps in `history`."""

    def message(self, text: str) -> None:
        """Something worth a line happened."""

    def step(self, metrics: Metrics, experiences: Sequence[Experience]) -> None:
        """A training step ended."""

    def evaluation(self, metrics: Metrics) -> None:
        """An evaluation ended."""

    def close(self) -> None:
        """The run ended, well or not."""


def make_view(show_completions: int, stream: TextIO | None = None) -> RunView:
    """A live view when `stream` (default: stdout) is a terminal, else plain lines.

    `show_completions` is how many sample completions the live view shows.
    """
    stream = stream or sys.stdout
    if not stream.isatty():
        return PlainView(stream)
    from rollmill.trackers.live_console import LiveView  # rich takes a while to import and plain runs do without

    return LiveView(show_completions, stream)


class PlainView:
    """One line per step, easy to grep: `step 12/30 stage=rl reward=0.531 loss=0.0123 812 tok/s 0.62 s`."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._progress = RunProgress([])

    def start(self, run_name: str, stages: Stages) -> None:
        """Print the plan."""
        self._progress = RunProgress(stages)
        plan = ", ".join(f"{name} ({steps} steps)" for name, steps in stages)
        self.message(f"run {run_name}: {plan}")

    def resume(self, history: Sequence[Metrics]) -> None:
        """Print after which step the run goes on."""
        for metrics in history:
            self._progress.update(metrics)
        self.message(f"resumed after step {self._progress.step}")

    def message(self, text: str) -> None:
        """Print `text`."""
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        line = printable(text).encode(encoding, "backslashreplace").decode(encoding)
        print(line, file=self._stream, flush=True)

    def step(self, metrics: Metrics, experiences: Sequence[Experience]) -> None:
        """Print the line of a step."""
        self._progress.update(metrics)
        self.message(self._line("step", metrics))

    def evaluation(self, metrics: Metrics) -> None:
        """Print the line of an evaluation."""
        self._progress.update(metrics)
        self.message(self._line("eval", metrics))

    def close(self) -> None:
        """Nothing to do: every line is out."""

    def _line(self, what: str, metrics: Metrics) -> str:
        words = [what, f"{metrics['step']}/{self._progress.total}"]
        if "stage" in metrics:
            words.append(f"stage={one_line(str(metrics['stage']), 40)}")
        words += [f"{short}={format_metric(metrics[key])}" for key, short in _SHOWN.items() if key in metrics]
        words += [f"eval/{name}={format_metric(value)}" for name, value in accuracies(metrics).items()]
        if metrics.get("tokens_per_second") is not None:
            words.append(f"{float(metrics['tokens_per_second'] or 0):.0f} tok/s")
        if metrics.get("seconds/total") is not None:
            words.append(f"{float(metrics['seconds/total'] or 0):.2f} s")
        return " ".join(words)


def format_metric(value: Metric) -> str:
    """A metric in few characters; `nan` when it is missing."""
    if value is None:
        return "nan"
    if isinstance(value, str | int):
        return str(value)
    return f"{value:.3f}" if value == 0 or 0.0995 <= abs(value) < 1000 else f"{value:.3g}"


def format_duration(seconds: float) -> str:
    """A duration as people say it: 0.31 s, 8.3 s, 2 min 05 s, 1 h 12 min."""
    if seconds < 1:
        return f"{seconds:.2f} s"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
