"""Learning curves of several seeds as one SVG: a line per side, and a band from the lowest to the highest seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

Points = Sequence[tuple[float, float]]
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 380, 56, 16, 40, 48
END, MIDDLE = 'text-anchor="end" fill="#57606a"', 'text-anchor="middle" fill="#57606a"'
COLOURS = ("#1f6feb", "#d1242f", "#57606a", "#1a7f37")


def draw(path: Path, title: str, x_label: str, y_label: str, sides: Mapping[str, Sequence[Points]]) -> None:
    """Write the plot. All seeds of a side have the same x values; y runs from 0 to 1."""
    last = max(x for seeds in sides.values() for points in seeds for x, _ in points)

    def place(x: float, y: float) -> str:
        across, down = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
        return f"{LEFT + x / last * across:.1f},{TOP + (1 - y) * down:.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="13">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="22" font-size="15" fill="#1f2328">{escape(title)}</text>',
    ]
    for tenth in range(0, 11, 2):
        (x1, y), x2 = place(0, tenth / 10).split(","), WIDTH - RIGHT
        parts.append(f'<path d="M{x1},{y}H{x2}" stroke="#d0d7de"/>')
        parts.append(
            f'<text x="{LEFT - 8}" y="{float(y) + 4:.1f}" text-anchor="end" fill="#57606a">{tenth * 10} %</text>'
        )
    for quarter in range(5):
        x, y = place(last * quarter / 4, 0).split(",")
        parts.append(f'<text x="{x}" y="{float(y) + 18:.1f}" {MIDDLE}>{last * quarter / 4:,.0f}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 10}" text-anchor="middle" fill="#1f2328">{escape(x_label)}</text>')
    parts.append(
        f'<text x="14" y="{(TOP + HEIGHT - BOTTOM) / 2}" text-anchor="middle" fill="#1f2328" '
        f'transform="rotate(-90 14 {(TOP + HEIGHT - BOTTOM) / 2})">{escape(y_label)}</text>'
    )
    for number, (name, seeds) in enumerate(sides.items()):
        colour = COLOURS[number]
        columns = [[points[i] for points in seeds] for i in range(min(map(len, seeds)))]
        low = [(each[0][0], min(y for _, y in each)) for each in columns]
        high = [(each[0][0], max(y for _, y in each)) for each in columns]
        mean = [(each[0][0], sum(y for _, y in each) / len(each)) for each in columns]
        band = " ".join(place(*point) for point in (*high, *reversed(low)))
        parts.append(f'<polygon points="{band}" fill="{colour}" opacity="0.15"/>')
        line = " ".join(place(*point) for point in mean)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2.5"/>')
        y = TOP + (HEIGHT - TOP - BOTTOM) * 0.62 + 20 * number
        parts.append(f'<path d="M{WIDTH * 0.52:.0f},{y}h24" stroke="{colour}" stroke-width="2.5"/>')
        parts.append(f'<text x="{WIDTH * 0.52 + 32:.0f}" y="{y + 4:.1f}" fill="#1f2328">{escape(name)}</text>')
    path.write_text("\n".join([*parts, "</svg>"]) + "\n")
