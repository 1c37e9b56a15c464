"""bench.html: checkpoints compared in one self-contained page."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

import rollmill.report.charts as charts
from rollmill.report.charts import LineChart, Series, nice_ticks
from rollmill.trackers.console import format_metric

WIDTH, LEFT, RIGHT, ROW, TOP = 640, 210, 620, 24, 14

BenchResult = Mapping[str, Any]
"""subject, run, step, set, measure, value, low, high of one estimate."""


@dataclass(frozen=True)
class IntervalMark:
    """One estimate with its interval, in the coordinates of its plot."""

    label: str
    about: str
    y: float
    x: float
    low: float
    high: float
    colour: int


@dataclass(frozen=True)
class IntervalPlot:
    """Estimates of one measure below each other."""

    title: str
    height: int
    ticks: list[tuple[float, str]]
    marks: list[IntervalMark]


def render_bench_report(results: Sequence[BenchResult], comparisons: Sequence[Mapping[str, Any]]) -> str:
    """The page: plots with intervals, curves of runs with several checkpoints, and tables."""
    environment = Environment(
        loader=PackageLoader("rollmill.report"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters["number"] = format_metric
    script = environment.get_template("report.js.j2").render()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    pairs = list(dict.fromkeys((each["set"], each["measure"]) for each in results))
    return environment.get_template("bench.html.j2").render(
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


def _plot(name: str, measure: str, results: Sequence[BenchResult]) -> IntervalPlot:
    own = [each for each in results if (each["set"], each["measure"]) == (name, measure)]
    ticks = nice_ticks(min(each["low"] for each in own), max(each["high"] for each in own))

    def at(value: float) -> float:
        return round(LEFT + (RIGHT - LEFT) * (value - ticks[0]) / (ticks[-1] - ticks[0]), 1)

    runs = list(dict.fromkeys(each["run"] or each["subject"] for each in own))
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
        for number, each in enumerate(own)
    ]
    places = [(at(tick), charts.format_tick(tick)) for tick in ticks]
    return IntervalPlot(_title(name, measure), TOP + ROW * len(own) + 24, places, marks)


def _curve(name: str, measure: str, results: Sequence[BenchResult]) -> LineChart | None:
    """Over the steps of runs of which several checkpoints were evaluated."""
    own = [each for each in results if (each["set"], each["measure"]) == (name, measure) and each["run"] is not None]
    runs = [run for run in dict.fromkeys(each["run"] for each in own) if sum(each["run"] == run for each in own) > 1]
    rows: dict[int, dict[str, Any]] = {}
    for each in own:
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
