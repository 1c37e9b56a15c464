"""Live view of a run in a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from typing import TextIO, cast

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from rollmill.trackers.console import (
    DroppingOutput,
    RunProgress,
    Stages,
    format_duration,
    format_metric,
    one_line,
    printable,
    shown_metrics,
)
from rollmill.trackers.domains import DomainProgress
from rollmill.trackers.eval_metrics import accuracies, first_accuracy, has_evaluation
from rollmill.trackers.metrics_log import Metrics
from rollmill.types import Experience

PHASE_COLOURS = {"rollout": "blue", "reward": "yellow", "train": "magenta", "eval": "green", "checkpoint": "cyan"}
_TICKS = "▁▂▃▄▅▆▇█"
_NUMBERS = ("staleness/max", "logprob_gap/max", "policy_drift/mean", "lr")
"""Shown after the metrics of the step's line."""
_SAMPLE_LINES = 6


class LiveView:
    """Redraws a panel in place at every event; messages and evaluations scroll above it.

    Model output is shown literally, without the effect of rich markup or terminal escape codes.
    """

    def __init__(self, show_completions: int = 1, stream: TextIO | None = None, console: Console | None = None) -> None:
        output = DroppingOutput(stream or sys.stdout)
        self._console = console or Console(file=cast(TextIO, output))
        self._show_completions = show_completions
        self._run_name = ""
        self._progress, self._domains = RunProgress([]), DomainProgress()
        self._metrics: Metrics = {}
        self._rewards: list[float | None] = []
        self._accuracies: list[float | None] = []
        self._samples: list[Experience] = []
        self._begun = time.monotonic()
        self._live = Live(console=self._console, auto_refresh=False, vertical_overflow="ellipsis")

    def start(self, run_name: str, stages: Stages) -> None:
        """Start the panel at the end of the terminal."""
        self._run_name = run_name
        self._progress = RunProgress(stages)
        self._live.start()
        self._redraw()

    def resume(self, history: Sequence[Metrics]) -> None:
        """Reset the curves to `history`."""
        self._rewards, self._accuracies, self._domains = [], [], DomainProgress()
        for metrics in history:
            self._take(metrics)
        self.message(f"resumed after step {self._progress.step}")

    def message(self, text: str) -> None:
        """Print `text` above the panel."""
        self._console.print(Text(printable(text)))
        self._redraw()

    def step(self, metrics: Metrics, experiences: Sequence[Experience]) -> None:
        """Show a step's metrics and the first completion of its first groups."""
        self._take(metrics)
        self._metrics = metrics
        if has_evaluation(metrics):
            self._announce(metrics)
        self._samples = list({one.group: one for one in reversed(experiences)}.values())[::-1][: self._show_completions]
        self._redraw()

    def evaluation(self, metrics: Metrics) -> None:
        """Print the accuracies above the panel and extend the sparkline."""
        self._take(metrics)
        self._announce(metrics)
        self._redraw()

    def close(self) -> None:
        """Stop the panel; its last state stays on the screen."""
        self._live.stop()

    def _take(self, metrics: Metrics) -> None:
        self._progress.update(metrics)
        self._domains.update(metrics)
        if "reward/mean" in metrics:
            self._rewards.append(_number(metrics, "reward/mean"))
        if (accuracy := first_accuracy(metrics)) is not None:
            self._accuracies.append(accuracy)

    def _announce(self, metrics: Metrics) -> None:
        parts = []
        for name, value in accuracies(metrics).items():
            parts.append(f"{name} {percent(value)}")
            if metrics.get(f"eval/{name}_low") is not None:
                low, high = metrics[f"eval/{name}_low"], metrics[f"eval/{name}_high"]
                parts.append(f"({percent(low)} to {percent(high)})")
        self._console.print(Text(f"evaluation after step {metrics['step']}: {' '.join(parts)}", style="green"))

    def _redraw(self) -> None:
        if self._live.is_started:
            self._live.update(self.render(), refresh=True)

    def render(self) -> RenderableType:
        parts: list[RenderableType] = [self._header(), self._curves(), *self._domain_lines()]
        if self._metrics:
            parts += [self._numbers(), self._phases()]
        for sample in self._samples:
            parts += [Rule(style="dim"), _sample(sample)]
        return Panel(Group(*parts), title=Text(one_line(self._run_name, 60), style="bold"), border_style="blue")

    def _header(self) -> RenderableType:
        progress = self._progress
        left = progress.seconds_left
        times = f"{format_duration(time.monotonic() - self._begun)} so far"
        if left is not None:
            times += f", stage ends in {format_duration(left)}"
        header = Table.grid(padding=(0, 2))
        header.add_row(
            Text(f"stage {progress.index + 1}/{len(progress.stages)} {one_line(progress.stage, 24)}", style="bold"),
            Text(f"step {progress.stage_step}/{progress.stage_total}"),
            ProgressBar(total=max(1, progress.stage_total), completed=progress.stage_step, width=24),
        )
        return Group(header, Text(times, style="dim"))

    def _curves(self) -> RenderableType:
        width = max(8, min(60, self._console.width - 34))
        table = Table.grid(padding=(0, 1))
        for name, values, style in (("reward", self._rewards, "yellow"), ("accuracy", self._accuracies, "green")):
            if values:
                last = "nan" if values[-1] is None else f"{values[-1]:.3f}"
                table.add_row(Text(name), Text(sparkline(values, width), style=style), Text(last, style="bold"))
        return table

    def _domain_lines(self) -> list[RenderableType]:
        """A line per domain: rewards, the last one, share of the batch, accuracy, and whether it is paused."""
        width = max(8, min(30, self._console.width - 60))
        table = Table.grid(padding=(0, 1))
        for domain in self._domains.states:
            accuracy = "" if domain.accuracy is None else f"accuracy {percent(domain.accuracy)}"
            table.add_row(
                Text(one_line(domain.name, 16)),
                Text(sparkline(self._domains.rewards(domain.name), width), style="yellow"),
                Text(format_metric(domain.reward), style="bold"),
                Text(f"{percent(domain.share)} of the batch", style="dim"),
                Text(accuracy, style="green"),
                Text("paused" if domain.paused else "", style="bold red"),
            )
        return [table] if table.row_count else []

    def _numbers(self) -> RenderableType:
        line = Text()
        leading, others = shown_metrics(self._metrics)
        for key in (*leading, *others, *_NUMBERS):
            if key in self._metrics:
                line.append(f"{key.removesuffix('/mean')} ", style="dim")
                line.append(f"{format_metric(self._metrics[key])}  ")
        return line

    def _phases(self) -> RenderableType:
        line = Text(f"{_number(self._metrics, 'tokens_per_second') or 0:,.0f} tok/s  ", style="bold")
        phases = phase_seconds(self._metrics)
        total = sum(phases.values())
        width = max(10, min(40, self._console.width - 70))
        for phase, seconds in phases.items():
            line.append("█" * round(width * seconds / total if total else 0), style=PHASE_COLOURS.get(phase, "white"))
        for phase, seconds in phases.items():
            line.append(f"  {phase}", style=PHASE_COLOURS.get(phase, "white"))
            line.append(f" {seconds:.2f} s")
        return line


def sparkline(values: Sequence[float | None], width: int) -> str:
    """The last `width` values as block characters, scaled to their range; a missing value is a gap."""
    shown = values[-width:]
    present = [value for value in shown if value is not None]
    low, high = min(present, default=0.0), max(present, default=0.0)
    scale = (len(_TICKS) - 1) / (high - low) if high > low else 0.0
    return "".join(" " if value is None else _TICKS[round((value - low) * scale)] for value in shown)


def phase_seconds(metrics: Mapping[str, object]) -> dict[str, float]:
    """Seconds by phase of a step, in the order of the phases: the `seconds/...` metrics without their total."""
    spent = {
        key.removeprefix("seconds/"): float(value)
        for key, value in metrics.items()
        if key.startswith("seconds/") and key != "seconds/total" and isinstance(value, float | int)
    }
    return {phase: spent[phase] for phase in sorted(spent, key=[*PHASE_COLOURS, *spent].index)}


def percent(value: object) -> str:
    """Format a share as a percentage."""
    return f"{100 * value:.1f} %" if isinstance(value, float | int) else "not measured"


def _sample(experience: Experience) -> Text:
    reward = "no reward" if experience.reward is None else f"{experience.reward:.3f}"
    text = Text(one_line(experience.prompt.strip(), 200) + "\n", style="dim")
    response = printable(experience.response).split("\n")
    shown = "\n".join(response[:_SAMPLE_LINES]) + (" ..." if len(response) > _SAMPLE_LINES else "")
    text.append(shown[:800], style="not dim")
    text.append(
        f"\nreward {reward}, {experience.action_tokens} tokens, ended by {experience.stop_reason}", style="bold"
    )
    return text


def _number(metrics: Metrics, key: str) -> float | None:
    value = metrics.get(key)
    return float(value) if isinstance(value, float | int) else None
