"""Writes bench.html: a comparison of checkpoints in one self-contained page."""

from __future__ import annotations

import base64
import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

import rollmill.apps.studio.report.charts as charts
from rollmill.apps.studio.report.charts import LineChart, Series, nice_ticks
from rollmill.files import atomic_write
from rollmill.trackers.console import format_metric

WIDTH, LEFT, RIGHT, ROW, TOP = 640, 210, 620, 24, 14

BenchResult = Mapping[str, Any]
"""One estimate: subject, run, step, set, measure, value, low, high."""


@dataclass(frozen=True)
class IntervalMark:
    """One estimate with its interval, in plot coordinates."""

    label: str
    about: str
    y: float
    x: float
    low: float
    high: float
    colour: int


@dataclass(frozen=True)
class IntervalPlot:
    """Plot of the estimates of one measure, one per row."""

    title: str
    height: int
    ticks: list[tuple[float, str]]
    marks: list[IntervalMark]


def write_bench_report(folder: Path, results: Sequence[BenchResult], comparisons: Sequence[Mapping[str, Any]]) -> None:
    """Write bench.html: plots with intervals, curves of runs with several checkpoints, and tables."""
    environment = Environment(
        loader=PackageLoader("rollmill.apps.studio.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    environment.filters["number"] = format_metric
    script = environment.get_template("report.js.j2").render()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    pairs = list(dict.fromkeys((each["set"], each["measure"]) for each in results))
    page = environment.get_template("bench.html.j2").render(
        results=results,
        comparisons=comparisons,
        plots=[_plot(name, measure, results) for name, measure in pairs],
        curves=[chart for name, measure in pairs if (chart := _curve(name, measure, results)) is not None],
        subjects=len({each["subject"] for each in results}),
        geometry=charts,
        plane={"width": WIDTH, "left": LEFT, "right": RIGHT, "top": TOP},
        script=Markup(script),
        script_hash=digest,
    )
    atomic_write(folder / "bench.html", page.encode("utf-8", "backslashreplace"))


def _plot(name: str, measure: str, results: Sequence[BenchResult]) -> IntervalPlot:
    chosen = [each for each in results if (each["set"], each["measure"]) == (name, measure)]
    ticks = nice_ticks(min(each["low"] for each in chosen), max(each["high"] for each in chosen))

    def at(value: float) -> float:
        return round(LEFT + (RIGHT - LEFT) * (value - ticks[0]) / (ticks[-1] - ticks[0]), 1)

    runs = list(dict.fromkeys(each["run"] or each["subject"] for each in chosen))
    marks = [
        IntervalMark(
            each["subject"],
            f"{each['value']:.3f} ({each['low']:.3f} to {each['high']:.3f})",
            TOP + ROW * (number + 0.5),
            at(each["value"]),
            at(each["low"]),
            at(each["high"]),
            runs.index(each["run"] or each["subject"]) % 6,
        )
        for number, each in enumerate(chosen)
    ]
    labelled_ticks = [(at(tick), charts.format_tick(tick)) for tick in ticks]
    return IntervalPlot(_title(name, measure), TOP + ROW * len(chosen) + 24, labelled_ticks, marks)


def _curve(name: str, measure: str, results: Sequence[BenchResult]) -> LineChart | None:
    """Curve over the steps of runs with several evaluated checkpoints; None if there are none."""
    chosen = [each for each in results if (each["set"], each["measure"]) == (name, measure) and each["run"] is not None]
    counts = Counter(each["run"] for each in chosen)
    runs = [run for run, count in counts.items() if count > 1]
    rows: dict[int, dict[str, Any]] = {}
    for each in chosen:
        row = rows.setdefault(each["step"], {"step": each["step"], "stage": None})
        row |= {f"{each['run']}{suffix}": each[key] for suffix, key in (("", "value"), ("/l", "low"), ("/h", "high"))}
    lines = [Series(run, run, f"{run}/l", f"{run}/h", dots=True) for run in runs]
    return (
        charts.draw_line_chart(_title(name, measure), "By step", lines, [rows[step] for step in sorted(rows)])
        if lines
        else None
    )


def _title(name: str, measure: str) -> str:
    return f"{name} {measure}".strip()
