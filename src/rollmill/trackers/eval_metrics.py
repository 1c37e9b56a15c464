"""Finds and plots the evaluation metrics of a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import rollmill.report.charts as charts
from rollmill.report.charts import LineChart, MetricsRow, Series

EVAL_PREFIX = "eval/"
_ACCURACIES = ("greedy", "sampled")


def has_evaluation(row: Mapping[str, Any]) -> bool:
    """True if a row of metrics has those of an evaluation."""
    return any(key.startswith(EVAL_PREFIX) for key in row)


def accuracies(row: Mapping[str, Any]) -> dict[str, Any]:
    """Greedy and sampled accuracy of every evaluation set, by name without `eval/`."""
    return {
        key.removeprefix(EVAL_PREFIX): value
        for key, value in row.items()
        if key.startswith(EVAL_PREFIX) and key.rpartition("/")[2] in _ACCURACIES
    }


def first_accuracy(row: Mapping[str, Any], order: Sequence[str] = ("sampled", "greedy")) -> float | None:
    """Sampled accuracy of the first set that has it, else greedy (or in another `order`); None if there is neither."""
    found = accuracies(row)
    for what in order:
        for key, value in found.items():
            if key.rpartition("/")[2] == what and charts.is_plottable(value):
                return float(value)
    return None


def eval_sets_in(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Evaluation set -> its measures, in the order of the rows; "" is the set without a name."""
    found: dict[str, list[str]] = {}
    for row in rows:
        for key in row:
            if key.startswith(EVAL_PREFIX) and not key.endswith(("_low", "_high")):
                name, _, what = key.removeprefix(EVAL_PREFIX).rpartition("/")
                if what not in found.setdefault(name, []):
                    found[name].append(what)
    return found


def evaluation_charts(rows: Sequence[MetricsRow]) -> list[LineChart | None]:
    """Draw charts for every set: its accuracies, pass@k and the like, and rewards that are no accuracies."""
    drawn: list[LineChart | None] = []
    for name, measures in eval_sets_in(rows).items():
        title = name or "Accuracy"
        simple = [each for each in _ACCURACIES if each in measures]
        several = [each for each in measures if "@" in each]
        drawn.append(charts.draw_line_chart(title, "Share of held-out tasks solved", _lines(name, simple), rows, 0.0))
        for what in dict.fromkeys(each.partition("@")[0] for each in several):
            chosen = [each for each in several if each.startswith(f"{what}@")]
            caption = {"pass": "One of k is correct", "maj": "A vote of k is correct", "mean": "Mean of k"}[what]
            drawn.append(charts.draw_line_chart(f"{what}@k {name}".strip(), caption, _lines(name, chosen), rows, 0.0))
        key = f"{EVAL_PREFIX}{name}/reward" if name else f"{EVAL_PREFIX}reward"
        if any(charts.is_plottable(row.get(key)) and not 0 <= row[key] <= 1 for row in rows) or not simple:
            line = Series(key, "mean reward", dots=True)
            drawn.append(charts.draw_line_chart(f"Reward {name}".strip(), "Mean of an evaluation", [line], rows))
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
