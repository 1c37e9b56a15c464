"""Results of a bench: estimates of every cell, and differences between models on the same tasks."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import combinations
from typing import Any

from rollmill.orchestrator.eval_targets import EvalTarget
from rollmill.orchestrator.evaluation_set import SetResult
from rollmill.trackers.estimators import IntervalEstimate, PairedDifference, paired_difference

COLUMNS = ("subject", "run", "step", "set", "measure", "value", "low", "high", "tasks", "samples")


@dataclass(frozen=True, slots=True)
class Cell:
    """Result of one model on one set."""

    subject: EvalTarget
    result: SetResult


@dataclass(frozen=True, slots=True)
class Comparison:
    """Paired difference of two models (second minus first), on the tasks that both have answered."""

    set: str
    measure: str
    one: str
    other: str
    tasks: int
    difference: PairedDifference


class Results:
    """Cells in the order of subjects and sets."""

    def __init__(self, cells: Sequence[Cell]) -> None:
        self.cells = list(cells)

    @property
    def sets(self) -> list[str]:
        return list(dict.fromkeys(cell.result.name for cell in self.cells))

    def rows(self) -> Iterator[tuple[Cell, str, IntervalEstimate]]:
        """Every estimate; `mean@N` is another name for `sampled` and left out."""
        for cell in self.cells:
            for measure, estimate in cell.result.estimates().items():
                if not measure.startswith("mean@"):
                    yield cell, measure, estimate

    @cached_property
    def comparisons(self) -> list[Comparison]:
        """Comparisons of all pairs of models, by set and measure."""
        found: list[Comparison] = []
        for name in self.sets:
            cells = [cell for cell in self.cells if cell.result.name == name]
            for one, other in combinations(cells, 2):
                found += _compared(name, one, other)
        return found

    def to_json(self) -> dict[str, Any]:
        return {
            "results": [_row(*each) for each in self.rows()],
            "comparisons": [
                {**asdict(each), **asdict(each.difference), "difference": each.difference.value}
                for each in self.comparisons
            ],
            "cells": [{"subject": cell.subject.label, **cell.result.to_json()} for cell in self.cells],
        }

    def to_csv(self) -> str:
        """The estimates, one per line."""
        text = io.StringIO()
        writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(_row(*each) for each in self.rows())
        return text.getvalue()


def _row(cell: Cell, measure: str, estimate: IntervalEstimate) -> dict[str, Any]:
    subject, result = cell.subject, cell.result
    return {
        "subject": subject.label,
        "run": None if subject.run is None else str(subject.run),
        "step": subject.step,
        "set": result.name,
        "measure": measure,
        **asdict(estimate),
        "tasks": len(result.tasks),
        "samples": 1 if measure == "greedy" else len(result.tasks[0].sampled),
    }


def _compared(name: str, one: Cell, other: Cell) -> Iterator[Comparison]:
    first, second = one.result.by_task(), other.result.by_task()
    places = {task.id: number for number, task in enumerate(other.result.tasks)}
    shared = [(number, places[task.id]) for number, task in enumerate(one.result.tasks) if task.id in places]
    for measure in first:
        if measure in second and shared and not measure.startswith("mean@"):
            values = [first[measure][here] for here, _ in shared], [second[measure][there] for _, there in shared]
            labels = one.subject.label, other.subject.label
            yield Comparison(name, measure, *labels, len(shared), paired_difference(*values))
