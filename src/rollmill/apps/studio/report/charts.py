"""Geometry of line charts, which the report's template draws as inline SVG."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from rollmill.trackers.metrics_log import is_finite_number

MetricsRow = dict[str, Any]

WIDTH, HEIGHT = 400, 200
LEFT, RIGHT, TOP, BOTTOM = 48, 388, 18, 176
_MOST_POINTS = 500
_SMOOTH_FROM = 30  # points


@dataclass
class Series:
    """One series. `low` and `high` name the metrics of a band around it; `spread` is added and subtracted instead."""

    key: str
    name: str
    low: str = ""
    high: str = ""
    spread: str = ""
    smooth: bool = False
    dots: bool = False


@dataclass
class DrawnSeries:
    """A series in chart coordinates; paths are the `d` of an SVG path."""

    name: str
    last: str
    path: str
    faint: str = ""
    band: str = ""
    dots: list[tuple[float, float]] = field(default_factory=list)


@dataclass
class LineChart:
    """A chart ready to be drawn. `hover` is JSON: the steps, their positions and the values of every series."""

    title: str
    caption: str
    lines: list[DrawnSeries]
    y_ticks: list[tuple[float, str]]
    x_ticks: list[tuple[float, str]]
    boundaries: list[tuple[float, str]]
    hover: str


def draw_line_chart(
    title: str, caption: str, lines: Sequence[Series], rows: Sequence[MetricsRow], low: float | None = None
) -> LineChart | None:
    """Lay out a chart of metrics over the steps of `rows`; None if none of them was measured.

    The y axis starts at `low` unless a value is below it. Series break where the stage changes.
    """
    lines = [line for line in lines if any(is_finite_number(row.get(line.key)) for row in rows)]
    used = _thin([row for row in rows if any(is_finite_number(row.get(line.key)) for line in lines)], lines)
    if not used:
        return None
    values = [value for row in used for line in lines for value in _extent(row, line)]
    ticks = nice_ticks(min([*values, *([] if low is None else [low])]), max(values))
    first, last = used[0]["step"], used[-1]["step"]

    def at(step: float, value: float) -> tuple[float, float]:
        x = (LEFT + RIGHT) / 2 if last == first else LEFT + (RIGHT - LEFT) * (step - first) / (last - first)
        y = BOTTOM - (BOTTOM - TOP) * (value - ticks[0]) / (ticks[-1] - ticks[0])
        return round(x, 1), round(y, 1)

    places = range(first, last + 1)
    return LineChart(
        title,
        caption,
        [_drawn(line, used, at) for line in lines],
        [(at(first, tick)[1], format_tick(tick)) for tick in ticks],
        [(at(step, ticks[0])[0], str(step)) for step in sorted({places[0], places[len(places) // 2], places[-1]})],
        [(at(step - 0.5, ticks[0])[0], name) for step, name in stage_starts(rows) if first < step <= last],
        _hover(used, lines, at),
    )


def nice_ticks(low: float, high: float) -> list[float]:
    """Three to seven round numbers whose first and last enclose [low, high]."""
    if high - low < 1e-12 * max(1.0, abs(high)):
        pad = abs(high) / 2 or 0.5
        low, high = low - pad, high + pad
    raw = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [index * step for index in range(first, last + 1)]


def format_tick(value: float) -> str:
    """Format a number for an axis: at most four significant digits, thousands as k and M."""
    for size, unit in ((1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e6 if unit == 'M' else 1e3):.4g}{unit}"
    return f"{value:.4g}"


def stage_starts(rows: Sequence[MetricsRow]) -> list[tuple[int, str]]:
    """First step and name of each stage except the first. Rows without a stage belong to the stage before."""
    named = [row for row in rows if row.get("stage") is not None]
    return [(row["step"], str(row["stage"])) for before, row in pairwise(named) if row["stage"] != before["stage"]]


def _extent(row: MetricsRow, line: Series) -> Iterable[float]:
    value, low, high = row.get(line.key), *_band(row, line)
    return [float(one) for one in (value, low, high) if is_finite_number(one)]  # type: ignore[arg-type]


def _band(row: MetricsRow, line: Series) -> tuple[float | None, float | None]:
    if line.spread and is_finite_number(row.get(line.spread)) and is_finite_number(row.get(line.key)):
        return row[line.key] - row[line.spread], row[line.key] + row[line.spread]
    return row.get(line.low), row.get(line.high)


def _segments(rows: Sequence[MetricsRow], line: Series) -> list[list[MetricsRow]]:
    """Rows with a value of the series, split where the stage changes."""
    segments: list[list[MetricsRow]] = []
    stage: object = object()
    for row in rows:
        if is_finite_number(row.get(line.key)):
            if (row.get("stage") != stage and not line.dots) or not segments:
                segments.append([])
            stage = row.get("stage")
            segments[-1].append(row)
    return segments


def _drawn(line: Series, rows: Sequence[MetricsRow], at: Any) -> DrawnSeries:
    segments = _segments(rows, line)
    count = sum(map(len, segments))
    raw = "".join(_path([at(row["step"], row[line.key]) for row in segment]) for segment in segments)
    path, faint = raw, ""
    if line.smooth and count >= _SMOOTH_FROM:
        faint = raw
        width = max(1.5, (rows[-1]["step"] - rows[0]["step"]) / 40)
        path = "".join(_path([at(*point) for point in _smoothed(segment, line.key, width)]) for segment in segments)
    band = ""
    for segment in segments:
        edges = [(row["step"], *_band(row, line)) for row in segment]
        edges = [edge for edge in edges if is_finite_number(edge[1]) and is_finite_number(edge[2])]
        if edges:
            outline = [at(step, high) for step, _, high in edges] + [at(step, low) for step, low, _ in reversed(edges)]
            band += _path(outline) + "Z"
    dots = [at(row["step"], row[line.key]) for segment in segments for row in segment]
    drawn = DrawnSeries(line.name, format_tick(segments[-1][-1][line.key]), path, faint, band)
    drawn.dots = dots if line.dots or len(dots) == 1 else []
    return drawn


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:g} {y:g}" for x, y in points)


def _smoothed(rows: Sequence[MetricsRow], key: str, width: float) -> list[tuple[float, float]]:
    """Smooth with a Gaussian of standard deviation `width` steps, which does not lag behind a trend."""
    first, last = rows[0], rows[-1]
    reach = math.ceil(3 * width * (len(rows) - 1) / max(1, last["step"] - first["step"]))
    points = []
    for at, row in enumerate(rows):
        near = rows[max(0, at - reach) : at + reach + 1]
        weights = [math.exp(-0.5 * ((other["step"] - row["step"]) / width) ** 2) for other in near]
        mean = sum(weight * other[key] for weight, other in zip(weights, near, strict=True)) / sum(weights)
        points.append((row["step"], mean))
    return points


def _thin(rows: Sequence[MetricsRow], lines: Sequence[Series]) -> list[MetricsRow]:
    """Reduce to at most `_MOST_POINTS` rows by the means of neighbouring rows."""
    size = -(-len(rows) // _MOST_POINTS)
    if size <= 1:
        return list(rows)
    keys = {key for line in lines for key in (line.key, line.low, line.high, line.spread) if key}
    thinned: list[MetricsRow] = []
    for begin in range(0, len(rows), size):
        block = rows[begin : begin + size]
        row: MetricsRow = {"step": block[-1]["step"], "stage": block[-1].get("stage")}
        for key in keys:
            present = [one[key] for one in block if is_finite_number(one.get(key))]
            if present:
                row[key] = sum(present) / len(present)
        thinned.append(row)
    return thinned


def _hover(rows: Sequence[MetricsRow], lines: Sequence[Series], at: Any) -> str:
    steps = [row["step"] for row in rows]
    series = [
        {
            "name": line.name,
            "values": [format_tick(row[line.key]) if is_finite_number(row.get(line.key)) else None for row in rows],
        }
        for line in lines
    ]
    return json.dumps({"steps": steps, "x": [at(step, 0.0)[0] for step in steps], "series": series})
