"""Line charts as SVG files, for the documentation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 640, 320
LEFT, RIGHT, TOP, BOTTOM = 56, 500, 24, 276
COLOURS = ("#1b6ca8", "#2a9d4e", "#b5651d", "#777777")


@dataclass
class Curve:
    """One line. Lines of the same name share a colour (a number) and an entry in the legend."""

    name: str
    colour: int
    points: list[tuple[float, float]]


def svg(x_name: str, y_name: str, curves: Sequence[Curve]) -> str:
    """Draw the chart as SVG text, on a white background, so that it is readable on any page."""
    right = max(x for curve in curves for x, _ in curve.points)
    low = int(min(y for curve in curves for _, y in curve.points) * 10) / 10
    high = -(-int(max(y for curve in curves for _, y in curve.points) * 100) // 10) / 10

    def place(x: float, y: float) -> tuple[float, float]:
        return LEFT + x / right * (RIGHT - LEFT), BOTTOM - (y - low) / (high - low) * (BOTTOM - TOP)

    parts = [f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>']
    for tick in range(round((high - low) * 10) + 1):
        y = low + tick / 10
        at = place(0, y)[1]
        parts.append(f'<path d="M{LEFT} {at:.1f}H{RIGHT}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{y:.1f}</text>')
    for tick in range(0, int(right) + 1, _tick_distance(right)):
        at = place(tick, low)[0]
        parts.append(f'<text x="{at:.1f}" y="{BOTTOM + 16}" text-anchor="middle">{tick:,}</text>')
    parts.append(f'<text x="{(LEFT + RIGHT) / 2}" y="{HEIGHT - 8}" text-anchor="middle">{escape(x_name)}</text>')
    parts.append(f'<text x="{LEFT}" y="{TOP - 10}">{escape(y_name)}</text>')
    for curve in curves:
        path = "L".join("{:.1f} {:.1f}".format(*place(x, y)) for x, y in curve.points)
        parts.append(f'<path d="M{path}" fill="none" stroke="{COLOURS[curve.colour]}" stroke-width="1.6"/>')
    for name, colour in dict.fromkeys((curve.name, curve.colour) for curve in curves):
        y = TOP + 12 + 22 * colour
        parts.append(f'<path d="M{RIGHT + 14} {y - 4}h22" stroke="{COLOURS[colour]}" stroke-width="3"/>')
        parts.append(f'<text x="{RIGHT + 42}" y="{y}">{escape(name)}</text>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" '
    return "\n".join([f'{head}font-family="sans-serif" font-size="12">', *parts, "</svg>\n"])


def _tick_distance(right: float) -> int:
    """Smallest of 1, 2, 5, 10, 20, ... with at most eight ticks."""
    steps = (step * int(10**power) for power in range(12) for step in (1, 2, 5))
    return next(step for step in steps if right <= 8 * step)
