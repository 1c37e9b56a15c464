"""Filters, sorts and samples tasks."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import regex

from rollmill.config.task_operators import FilterTasks, SampleTasks, SortTasks
from rollmill.data.operators.batch import TaskBatch
from rollmill.data.operators.deduplication import flatten_prompt
from rollmill.data.readers import to_finite_number
from rollmill.errors import TasksetError
from rollmill.types import Task

_OWN = ("id", "answer", "response", "rejected", "taskset")


def filter_tasks(options: FilterTasks) -> Callable[[TaskBatch], None]:
    """Drops tasks that fail a condition, or with `exclude` those that meet all.

    Raises TasksetError if no task has the field.
    """
    pattern = None if options.matches is None else regex.compile(options.matches)

    def apply(batch: TaskBatch) -> None:
        tasks = batch.tasks
        if options.field not in (*_OWN, "prompt") and not any(options.field in task.metadata for task in tasks):
            columns = ", ".join(dict.fromkeys(key for task in tasks[:100] for key in task.metadata)) or "none"
            raise TasksetError(
                f"taskset {batch.report.taskset}: operator `filter`: no task has a column {options.field} (columns: "
                f"{columns}); correct `field`"
            )
        for task in tasks:
            why = _failing(options, pattern, task_field(task, options.field))
            if options.exclude and why is None:
                batch.drop(task, f"excluded by {options.field}")
            elif not options.exclude and why is not None:
                batch.drop(task, f"{options.field} {why}")

    return apply


def task_field(task: Task, field: str) -> Any:
    """A text of the task, or a column of its metadata; None if it has none."""
    if field == "prompt":
        return flatten_prompt(task)
    return getattr(task, field) if field in _OWN else task.metadata.get(field)


def _failing(options: FilterTasks, pattern: regex.Pattern[str] | None, value: Any) -> str | None:
    """Describe the condition that a value fails; None if it meets all."""
    something = value is not None and value != "" and value != []
    if options.present is not None and options.present != something:
        return "missing" if options.present else "present"
    if options.at_least is not None or options.at_most is not None:
        number = to_finite_number(value)
        if number is None:
            return "no number" if something else "missing"
        if options.at_least is not None and number < options.at_least:
            return "too small"
        if options.at_most is not None and number > options.at_most:
            return "too great"
    if options.min_length is not None or options.max_length is not None:
        length = len(value) if isinstance(value, str | list) else 0 if value is None else len(str(value))
        if options.min_length is not None and length < options.min_length:
            return "too short"
        if options.max_length is not None and length > options.max_length:
            return "too long"
    if options.values is not None and not any(_same(value, each) for each in options.values):
        return "another value"
    if pattern is not None and (value is None or not pattern.search(str(value))):
        return "no match"
    return None


def _same(value: Any, expected: str | int | float | bool) -> bool:
    """True if two values are equal, also if a file holds a number as text; 1 does not equal true."""
    if isinstance(value, bool) or isinstance(expected, bool):
        return value is expected
    return bool(value == expected) or (isinstance(value, str) and value == str(expected))


def sort(options: SortTasks) -> Callable[[TaskBatch], None]:
    """Sorts tasks by a column, stably. Raises TasksetError if a task has no number there."""

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
        batch.arrange([tasks[index] for index in order])

    return apply


def sample(options: SampleTasks) -> Callable[[TaskBatch], None]:
    """Keeps `n` random tasks and drops the others."""

    def apply(batch: TaskBatch) -> None:
        tasks = batch.tasks
        chosen = set(random.Random(options.seed).sample(range(len(tasks)), min(options.n, len(tasks))))
        for number, task in enumerate(tasks):
            if number not in chosen:
                batch.drop(task, "not sampled")

    return apply
