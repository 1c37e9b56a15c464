"""Sets each task's difficulty in the column `difficulty`: greater is harder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import model_validator

from rollmill.config.task_operators import TaskOperatorSection
from rollmill.data.operators.batch import TaskBatch
from rollmill.data.readers import read_jsonl, to_finite_number
from rollmill.errors import TasksetError
from rollmill.types import Task

DIFFICULTY_COLUMN = "difficulty"


class RateTaskDifficulty(TaskOperatorSection):
    """Writes each task's difficulty to the column `difficulty`, for samplers, filters and `sort`."""

    name: Literal["difficulty"] = "difficulty"
    column: str = "difficulty"
    """Column to read: numbers, or words mapped by `values`."""
    scores: Path | None = None
    """File of `rollmill tasks score` to read `difficulty` from, by task id, instead of a column of the taskset."""
    values: dict[str, float] = {}
    """Difficulty of each word of the column, such as {easy: 0, medium: 0.5, hard: 1}."""
    range: tuple[float, float] | None = None
    """Numbers that are mapped to 0 and 1. The first may be the larger one: [1, 0] turns a success rate into a
    difficulty."""
    missing: float | None = None
    """Difficulty of tasks that have none. Default: an error that names them."""

    @model_validator(mode="after")
    def _range_has_ends(self) -> Self:
        if self.range is not None and self.range[0] == self.range[1]:
            raise ValueError(f"range: both ends are {self.range[0]:g}; give two numbers, such as [1, 5]")
        if self.scores is not None and (self.column != "difficulty" or self.values):
            raise ValueError("column and values are not honoured with scores; remove them")
        return self

    def __call__(self, batch: TaskBatch) -> None:
        """Set `difficulty` of every task."""
        scores = None if self.scores is None else read_scores(self.scores)
        unknown: list[tuple[Task, Any]] = []
        for task in batch.tasks:
            value = task.metadata.get(self.column) if scores is None else scores.get(task.id)
            found = self._number(value)
            if found is None and self.missing is None:
                unknown.append((task, value))
                continue
            new = self.missing if found is None else found
            if task.metadata.get(DIFFICULTY_COLUMN) != new:
                task.metadata[DIFFICULTY_COLUMN] = new
                batch.change(task, "not rated" if found is None else "rated")
        if unknown:
            task, value = unknown[0]
            where = f"the column {self.column}" if scores is None else f"{self.scores}"
            raise TasksetError(
                f"taskset {batch.report.taskset}: operator `difficulty`: {len(unknown)} of {batch.report.seen} tasks "
                f"have no number in {where} (first: task {task.id} has {value!r:.40}); correct them, translate words "
                "by `values`, or give `missing`"
            )

    def _number(self, value: Any) -> float | None:
        found = self.values.get(str(value)) if self.values else None
        number = to_finite_number(value) if found is None else found
        if number is None or self.range is None:
            return number
        low, high = self.range
        return min(max((number - low) / (high - low), 0.0), 1.0)


def read_scores(path: Path) -> dict[str, float]:
    """Read difficulties by task id from a file of `rollmill tasks score`.

    Raises TasksetError naming the first line without one.
    """
    try:
        records = list(read_jsonl(path))
    except OSError as error:
        raise TasksetError(
            f"operator `difficulty`: scores: {path} cannot be read: {error.strerror or error}"
        ) from error
    found: dict[str, float] = {}
    for record in records:
        number = to_finite_number(record.row.get(DIFFICULTY_COLUMN))
        id = record.row.get("id")
        if record.problem is not None or number is None or not isinstance(id, str):
            problem = (
                record.problem
                or f"expected an id and a {DIFFICULTY_COLUMN}, found {json.dumps(record.row, default=str):.80}"
            )
            raise TasksetError(f"{record.where}: {problem}; make the file by `rollmill tasks score`")
        found[id] = number
    return found
