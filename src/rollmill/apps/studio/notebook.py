"""Progress of a run below a notebook's cell: a bar, curves and completions, as HTML that the run updates."""

from __future__ import annotations

import time
from collections.abc import Sequence
from html import escape
from typing import Any

from rollmill.apps.studio.report import charts
from rollmill.apps.studio.report.charts import Series, draw_line_chart
from rollmill.trackers.console import RunProgress, Stages, printable
from rollmill.trackers.metrics_log import Metrics
from rollmill.types import Experience

_EVERY_S = 0.5
"""Seconds between two updates; a browser draws each."""
_CURVES = (
    ("Reward", [Series("reward/mean", "reward")], 0.0),
    ("Accuracy", [Series("eval/greedy", "greedy", dots=True), Series("eval/sampled", "sampled", dots=True)], 0.0),
    ("Loss", [Series("loss", "loss")], None),
    ("KL", [Series("kl", "kl")], 0.0),
)
_COLOURS = ("#2563eb", "#d97706", "#059669", "#db2777")
_LONGEST = 300
_CELL = "padding:2px 8px;text-align:left;vertical-align:top;white-space:pre-wrap;border-top:1px solid #8884"


class NotebookView:
    """Shows a run in the cell that started it. Plain HTML: no widgets, and the last state stays in the notebook.

    Args:
        completions: rows of the table of completions.
    """

    def __init__(self, completions: int = 3) -> None:
        self._count = max(completions, 3) if completions else 0
        self._progress = RunProgress([])
        self._rows: dict[int, dict[str, Any]] = {}
        self._messages: list[str] = []
        self._experiences: Sequence[Experience] = ()
        self._display: Any = None
        self._shown_at = 0.0
        self._name, self._ended = "", False

    def start(self, run_name: str, stages: Stages) -> None:
        from IPython.display import HTML, display

        self._progress, self._name = RunProgress(stages), run_name
        self._display = display(HTML(self.html()), display_id=True)

    def resume(self, history: Sequence[Metrics]) -> None:
        for metrics in history:
            self._take(metrics)
        self._show()

    def message(self, text: str) -> None:
        self._messages.append(printable(text))
        self._show()

    def step(self, metrics: Metrics, experiences: Sequence[Experience]) -> None:
        self._take(metrics)
        self._experiences = experiences
        self._show(at_once=self._progress.step == self._progress.total)

    def evaluation(self, metrics: Metrics) -> None:
        self._take(metrics)
        self._show()

    def close(self) -> None:
        self._ended = True
        self._show(at_once=True)

    def _take(self, metrics: Metrics) -> None:
        self._progress.update(metrics)
        step = metrics["step"]
        assert isinstance(step, int)
        self._rows.setdefault(step, {}).update(metrics)

    def _show(self, at_once: bool = False) -> None:
        if self._display is None or (not at_once and time.monotonic() - self._shown_at < _EVERY_S):
            return
        from IPython.display import HTML

        self._display.update(HTML(self.html()))
        self._shown_at = time.monotonic()

    def html(self) -> str:
        rows = [self._rows[step] for step in sorted(self._rows)]
        drawn = [draw_line_chart(title, "", lines, rows, low) for title, lines, low in _CURVES]
        curves = "".join(_svg(chart) for chart in drawn if chart is not None)
        lines = "<br>".join(escape(text) for text in self._messages[-3:])
        return (
            f'<div style="font-family:sans-serif;font-size:13px">{self._bar()}'
            f'<div style="display:flex;flex-wrap:wrap;gap:12px">{curves}</div>{self._table()}'
            f'<div style="opacity:.7">{lines}</div></div>'
        )

    def _bar(self) -> str:
        progress = self._progress
        share = progress.step / progress.total if progress.total else 0.0
        left = progress.seconds_left
        rest = "" if left is None or self._ended else f", about {left:.0f} s left in stage {escape(progress.stage)}"
        return (
            f"<b>{escape(self._name)}</b> step {progress.step} of {progress.total}{rest}"
            f'<div style="background:#8883;height:6px;border-radius:3px;margin:4px 0 8px">'
            f'<div style="background:{_COLOURS[0]};height:6px;border-radius:3px;width:{share:.1%}"></div></div>'
        )

    def _table(self) -> str:
        shown = list(self._experiences)[: self._count]
        if not shown:
            return ""
        head = "".join(f'<th style="{_CELL}">{name}</th>' for name in ("reward", "prompt", "completion"))
        body = ""
        for each in shown:
            reward = "" if each.reward is None else f"{each.reward:.3g}"
            cells = (reward, _short(each.prompt), _short(each.response))
            body += "<tr>" + "".join(f'<td style="{_CELL}">{escape(cell)}</td>' for cell in cells) + "</tr>"
        return f'<table style="border-collapse:collapse;margin:8px 0"><tr>{head}</tr>{body}</table>'


def _svg(chart: charts.LineChart) -> str:
    """Draw a chart with colours that are readable on light and on dark pages."""
    text = 'fill="currentColor" font-size="10" opacity=".7"'
    parts = []
    for y, label in chart.y_ticks:
        parts.append(f'<line x1="{charts.LEFT}" x2="{charts.RIGHT}" y1="{y}" y2="{y}" stroke="#8884"/>')
        parts.append(f'<text x="{charts.LEFT - 6}" y="{y + 3}" text-anchor="end" {text}>{escape(label)}</text>')
    for x, label in chart.x_ticks:
        parts.append(f'<text x="{x}" y="{charts.BOTTOM + 15}" text-anchor="middle" {text}>{escape(label)}</text>')
    for colour, line in zip(_COLOURS, chart.lines, strict=False):
        parts.append(f'<path d="{line.path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        parts += [f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"/>' for x, y in line.dots]
    names = zip(_COLOURS, chart.lines, strict=False)
    legend = " ".join(
        f'<span style="color:{colour}">{escape(each.name)} {escape(each.last)}</span>' for colour, each in names
    )
    return (
        f'<div><b>{escape(chart.title)}</b> {legend}<br><svg viewBox="0 0 {charts.WIDTH} {charts.HEIGHT}" '
        f'width="{charts.WIDTH * 0.8:.0f}" role="img" aria-label="{escape(chart.title)}">{"".join(parts)}</svg></div>'
    )


def _short(text: str) -> str:
    shown = printable(text)
    return shown if len(shown) <= _LONGEST else f"{shown[:_LONGEST]}..."
