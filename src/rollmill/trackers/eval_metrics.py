"""Finds the evaluation metrics of a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rollmill.trackers.metrics_log import is_finite_number

EVAL_PREFIX = "eval/"
ACCURACIES = ("greedy", "sampled")


def has_evaluation(row: Mapping[str, Any]) -> bool:
    """True if a row of metrics has those of an evaluation."""
    return any(key.startswith(EVAL_PREFIX) for key in row)


def accuracies(row: Mapping[str, Any]) -> dict[str, Any]:
    """Greedy and sampled accuracy of every evaluation set, by name without `eval/`."""
    return {
        key.removeprefix(EVAL_PREFIX): value
        for key, value in row.items()
        if key.startswith(EVAL_PREFIX) and key.rpartition("/")[2] in ACCURACIES
    }


def first_accuracy(row: Mapping[str, Any], order: Sequence[str] = ("sampled", "greedy")) -> float | None:
    """Sampled accuracy of the first set that has it, else greedy (or in another `order`); None if there is neither."""
    found = accuracies(row)
    for what in order:
        for key, value in found.items():
            if key.rpartition("/")[2] == what and is_finite_number(value):
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
