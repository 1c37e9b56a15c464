"""Chooses the charts of evaluations and of domains."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rollmill.apps.studio.report.charts import LineChart, MetricsRow, Series, draw_line_chart
from rollmill.trackers.domains import batch_shares
from rollmill.trackers.eval_metrics import ACCURACIES, EVAL_PREFIX, eval_sets_in
from rollmill.trackers.metrics_log import is_finite_number


def evaluation_charts(rows: Sequence[MetricsRow]) -> list[LineChart | None]:
    """Draw charts for every set: its accuracies, pass@k and the like, and rewards that are no accuracies."""
    drawn: list[LineChart | None] = []
    for name, measures in eval_sets_in(rows).items():
        title = name or "Accuracy"
        simple = [each for each in ACCURACIES if each in measures]
        several = [each for each in measures if "@" in each]
        drawn.append(draw_line_chart(title, "Share of held-out tasks solved", _lines(name, simple), rows, 0.0))
        for what in dict.fromkeys(each.partition("@")[0] for each in several):
            chosen = [each for each in several if each.startswith(f"{what}@")]
            caption = {"pass": "One of k is correct", "maj": "A vote of k is correct", "mean": "Mean of k"}[what]
            drawn.append(draw_line_chart(f"{what}@k {name}".strip(), caption, _lines(name, chosen), rows, 0.0))
        key = f"{EVAL_PREFIX}{name}/reward" if name else f"{EVAL_PREFIX}reward"
        if any(is_finite_number(row.get(key)) and not 0 <= row[key] <= 1 for row in rows) or not simple:
            line = Series(key, "mean reward", dots=True)
            drawn.append(draw_line_chart(f"Reward {name}".strip(), "Mean of an evaluation", [line], rows))
    return drawn


def _lines(name: str, measures: Sequence[str]) -> list[Series]:
    lines = []
    for each in measures:
        key = f"{EVAL_PREFIX}{name}/{each}" if name else f"{EVAL_PREFIX}{each}"
        if each == "greedy":
            lines.append(Series(key, each, dots=True))
        else:
            lines.append(Series(key, f"{each}, 95 % interval", f"{key}_low", f"{key}_high", dots=True))
    return lines


def domain_charts(rows: Sequence[MetricsRow]) -> list[LineChart | None]:
    """Draw charts with a line per domain: reward, accuracy, share of the batch, pauses."""
    shares = [batch_shares(row) for row in rows]
    names = sorted({name for each in shares for name in each})
    by_step = [
        row | {f"batch/{name}": share for name, share in each.items()} for row, each in zip(rows, shares, strict=True)
    ]

    def draw(title: str, caption: str, series: Callable[[str], Series], low: float | None = 0.0) -> LineChart | None:
        return draw_line_chart(title, caption, [series(name) for name in names], by_step, low)

    sampled = {name for name in names if any(f"eval/{name}/sampled" in row for row in rows)}
    return [
        draw(
            "Reward by domain",
            "Mean of its completions in a batch",
            lambda name: Series(f"domain/{name}/reward", name, smooth=True),
            None,
        ),
        draw(
            "Accuracy by domain",
            "Share of the domain's held-out tasks solved",
            lambda name: Series(f"eval/{name}/{'sampled' if name in sampled else 'greedy'}", name, dots=True),
        ),
        draw(
            "Share of the batch",
            "Groups of the domain, of all of a step",
            lambda name: Series(f"batch/{name}", name, smooth=True),
        ),
        draw(
            "Replayed groups by domain", "Per step", lambda name: Series(f"domain/{name}/replayed", name, smooth=True)
        ),
        draw("Pauses", "1 while the domain is left out", lambda name: Series(f"tasks/{name}/paused", name)),
    ]
