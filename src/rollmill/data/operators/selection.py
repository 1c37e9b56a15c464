"""Tasks sorted, and some chosen at random."""

from __future__ import annotations

import random
from collections.abc import Callable

from rollmill.config.task_operators import SampleTasks, SortTasks
from rollmill.data.operators.batch import TaskBatch
from rollmill.data.records import to_finite_number
from rollmill.errors import TasksetError


def sort(options: SortTasks) -> Callable[[TaskBatch], None]:
    """Sorts tasks by a column; equal ones keep their order. Raises TasksetError where a task has no number there."""

    def apply(batch: TaskBatch) -> None:
        tasks = batch.tasks
        numbers = [to_finite_number(task.metadata.get(options.column)) for task in tasks]
        if None in numbers:
            count, task = numbers.count(None), tasks[numbers.index(None)]
            raise TasksetError(
                f"taskset {batch.report.taskset}: operator `sort`: {count} of {len(tasks)} tasks have no number in the "
                f"column {options.column} (first: task {task.id}); put the operator `difficulty` before it, or name "
                "another column"
            )
        sign = -1 if options.descending else 1
        order = sorted(range(len(tasks)), key=lambda index: sign * (numbers[index] or 0.0))
        batch.reorder([tasks[index] for index in order])

    return apply


def sample(options: SampleTasks) -> Callable[[TaskBatch], None]:
    """Drops all but `n` tasks."""

    def apply(batch: TaskBatch) -> None:
        tasks = batch.tasks
        chosen = set(random.Random(options.seed).sample(range(len(tasks)), min(options.n, len(tasks))))
        for number, task in enumerate(tasks):
            if number not in chosen:
                batch.drop(task, "not sampled")

    return apply
