"""The views of a run that goes on: plain lines here, a live one where the output is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Protocol, TextIO

from rollmill.trackers.console import (
    RunProgress,
    Stages,
    drop_output,
    format_metric,
    one_line,
    print_or_drop,
    printable,
    shown_metrics,
)
from rollmill.trackers.domains import DomainProgress
from rollmill.trackers.eval_metrics import accuracies
from rollmill.trackers.metrics_log import Metrics
from rollmill.types import Experience


class RunView(Protocol):
    """Shows a run. Calls come from one thread; `metrics` has the keys of metrics.jsonl."""

    def start(self, run_name: str, stages: Stages) -> None:
        """Start of the run; `stages` are names and planned steps."""

    def resume(self, history: Sequence[Metrics]) -> None:
        """The run resumes after the steps in `history`."""

    def message(self, text: str) -> None:
        """Show a message."""

    def step(self, metrics: Metrics, experiences: Sequence[Experience]) -> None:
        """Show a finished training step."""

    def evaluation(self, metrics: Metrics) -> None:
        """Show a finished evaluation."""

    def close(self) -> None:
        """End of the run, successful or not."""


class PlainView:
    """One line per step, easy to grep: `step 12/30 stage=rl reward=0.531 loss=0.0123 812 tok/s 0.62 s`.

    With domains, one more for each: `domain 12/30 name=math reward=0.531 share=0.667`.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream, self._failed = stream or sys.stdout, False
        self._progress, self._domains = RunProgress([]), DomainProgress()

    def start(self, run_name: str, stages: Stages) -> None:
        self._progress = RunProgress(stages)
        plan = ", ".join(f"{name} ({steps} steps)" for name, steps in stages)
        self.message(f"run {run_name}: {plan}")

    def resume(self, history: Sequence[Metrics]) -> None:
        """Print the step after which the run resumes."""
        for metrics in history:
            self._progress.update(metrics)
            self._domains.update(metrics)
        self.message(f"resumed after step {self._progress.step}")

    def message(self, text: str) -> None:
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        line = printable(text).encode(encoding, "backslashreplace").decode(encoding)
        if (why := print_or_drop(line, self._stream)) and not self._failed:
            self._failed = True
            print_or_drop(f"{why}; the run goes on (see `rollmill status`)", sys.stderr)

    def step(self, metrics: Metrics, experiences: Sequence[Experience]) -> None:
        """Print the line of a step, and one of each domain."""
        self._progress.update(metrics)
        self._domains.update(metrics)
        self.message(self._line("step", metrics))
        for domain in self._domains.states:
            words = ["domain", f"{metrics['step']}/{self._progress.total}", f"name={domain.name}"]
            words.append(f"reward={format_metric(domain.reward)} share={format_metric(domain.share)}")
            self.message(" ".join([*words, "paused"] if domain.paused else words))

    def evaluation(self, metrics: Metrics) -> None:
        """Print the line of an evaluation."""
        self._progress.update(metrics)
        self.message(self._line("eval", metrics))

    def close(self) -> None:
        """Drop lines that could not be written: Python would fail when it flushes them at the end."""
        if self._failed:
            drop_output(self._stream)

    def _line(self, what: str, metrics: Metrics) -> str:
        words = [what, f"{metrics['step']}/{self._progress.total}"]
        if "stage" in metrics:
            words.append(f"stage={one_line(str(metrics['stage']), 40)}")
        leading, others = shown_metrics(metrics)
        words += [f"{short}={format_metric(metrics[key])}" for key, short in leading.items()]
        words += [f"eval/{name}={format_metric(value)}" for name, value in accuracies(metrics).items()]
        words += [f"{short}={format_metric(metrics[key])}" for key, short in others.items()]
        if metrics.get("tokens_per_second") is not None:
            words.append(f"{float(metrics['tokens_per_second'] or 0):.0f} tok/s")
        if metrics.get("seconds/total") is not None:
            words.append(f"{float(metrics['seconds/total'] or 0):.2f} s")
        return " ".join(words)


def make_view(show_completions: int, stream: TextIO | None = None) -> RunView:
    """Make a live view if `stream` (default: stdout) is a terminal, else a plain one.

    `show_completions` is the number of sample completions in the live view.
    """
    stream = stream or sys.stdout
    if not stream.isatty():
        return PlainView(stream)
    from rollmill.trackers.live_console import LiveView  # importing rich is slow, and plain runs do not need it

    return LiveView(show_completions, stream)
