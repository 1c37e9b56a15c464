"""Sets each task's difficulty in the column `difficulty`: greater is harder."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rollmill.config.task_operators import RateTaskDifficulty
from rollmill.data.operators.batch import TaskBatch
from rollmill.data.readers import read_jsonl, to_finite_number
from rollmill.errors import TasksetError
from rollmill.types import Task

DIFFICULTY_COLUMN = "difficulty"


def difficulty(options: RateTaskDifficulty) -> Callable[[TaskBatch], None]:
    """Sets `difficulty` of every task. Raises TasksetError if a task has none and `missing` is not set."""

    def apply(batch: TaskBatch) -> None:
        scores = None if options.scores is None else read_scores(options.scores)
        unknown: list[tuple[Task, Any]] = []
        for task in batch.tasks:
            value = task.metadata.get(options.column) if scores is None else scores.get(task.id)
            found = _number(value, options)
            if found is None and options.missing is None:
                unknown.append((task, value))
                continue
            new = options.missing if found is None else found
            if task.metadata.get(DIFFICULTY_COLUMN) != new:
                task.metadata[DIFFICULTY_COLUMN] = new
                batch.change(task, "not rated" if found is None else "rated")
        if unknown:
            task, value = unknown[0]
            where = f"the column {options.column}" if scores is None else f"{options.scores}"
            raise TasksetError(
                f"taskset {batch.report.taskset}: operator `difficulty`: {len(unknown)} of {batch.report.seen} tasks "
                f"have no number in {where} (first: task {task.id} has {value!r:.40}); correct them, translate words "
                "by `values`, or give `missing`"
            )

    return apply


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


def _number(value: Any, options: RateTaskDifficulty) -> float | None:
    found = options.values.get(str(value)) if options.values else None
    number = to_finite_number(value) if found is None else found
    if number is None or options.range is None:
        return number
    low, high = options.range
    return min(max((number - low) / (high - low), 0.0), 1.0)
