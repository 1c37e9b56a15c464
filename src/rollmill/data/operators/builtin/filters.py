"""Filters, sorts and samples tasks."""

from __future__ import annotations

import random
from typing import Any, ClassVar, Literal, Self

import regex
from pydantic import Field, model_validator

from rollmill.config.task_operators import TaskOperatorSection
from rollmill.data.operators.batch import TaskBatch
from rollmill.data.operators.builtin.deduplication import flatten_prompt
from rollmill.data.readers import to_finite_number
from rollmill.errors import TasksetError

_OWN = ("id", "answer", "response", "rejected", "taskset")


class FilterTasks(TaskOperatorSection):
    """Keeps tasks whose field meets all conditions."""

    name: Literal["filter"] = "filter"
    field: str
    """`id`, `prompt`, `answer`, `response`, `rejected`, `taskset`, or a column of the task's metadata."""
    at_least: float | None = None
    """Minimum number."""
    at_most: float | None = None
    """Maximum number."""
    min_length: int | None = Field(None, ge=0)
    """Minimum length of a text in characters, or of a list in entries."""
    max_length: int | None = Field(None, ge=0)
    """Maximum length."""
    values: list[str | int | float | bool] | None = None
    """Allowed values."""
    matches: str | None = None
    """Regular expression that must match somewhere in the text."""
    present: bool | None = None
    """true: the field must not be empty. false: it must be empty."""
    exclude: bool = False
    """Drop the tasks that meet the conditions and keep all others."""

    @model_validator(mode="after")
    def _some_condition(self) -> Self:
        keys = [key for key in type(self).model_fields if key not in ("name", "field", "exclude")]
        if all(getattr(self, key) is None for key in keys):
            raise ValueError(f"give a condition: one of {', '.join(keys)}")
        if self.matches is not None:
            try:
                regex.compile(self.matches)
            except (regex.error, RecursionError) as error:
                raise ValueError(f"matches: not a regular expression: {error}; correct it") from error
        return self

    def __call__(self, batch: TaskBatch) -> None:
        tasks = batch.tasks
        if self.field not in (*_OWN, "prompt") and not any(self.field in task.metadata for task in tasks):
            columns = ", ".join(dict.fromkeys(key for task in tasks[:100] for key in task.metadata)) or "none"
            raise TasksetError(
                f"taskset {batch.report.taskset}: operator `filter`: no task has a column {self.field} (columns: "
                f"{columns}); correct `field`"
            )
        for task in tasks:
            if self.field == "prompt":
                value: Any = flatten_prompt(task)
            else:
                value = getattr(task, self.field) if self.field in _OWN else task.metadata.get(self.field)
            why = self._failing(value)
            if self.exclude and why is None:
                batch.drop(task, f"excluded by {self.field}")
            elif not self.exclude and why is not None:
                batch.drop(task, f"{self.field} {why}")

    def _failing(self, value: Any) -> str | None:
        """Describe the condition that a value fails; None if it meets all."""
        something = value is not None and value != "" and value != []
        if self.present is not None and self.present != something:
            return "missing" if self.present else "present"
        if self.at_least is not None or self.at_most is not None:
            number = to_finite_number(value)
            if number is None:
                return "no number" if something else "missing"
            if self.at_least is not None and number < self.at_least:
                return "too small"
            if self.at_most is not None and number > self.at_most:
                return "too great"
        if self.min_length is not None or self.max_length is not None:
            length = len(value) if isinstance(value, str | list) else 0 if value is None else len(str(value))
            if self.min_length is not None and length < self.min_length:
                return "too short"
            if self.max_length is not None and length > self.max_length:
                return "too long"
        if self.values is not None and not any(_same(value, each) for each in self.values):
            return "another value"
        if self.matches is not None and (value is None or not regex.search(self.matches, str(value))):
            return "no match"
        return None


def _same(value: Any, expected: str | int | float | bool) -> bool:
    """True if two values are equal, also if a file holds a number as text; 1 does not equal true."""
    if isinstance(value, bool) or isinstance(expected, bool):
        return value is expected
    return bool(value == expected) or (isinstance(value, str) and value == str(expected))


class SortTasks(TaskOperatorSection):
    """Sorts tasks, easy to hard; for `sampler: sequential` and for `limit` of an evaluation."""

    sorts: ClassVar[bool] = True

    name: Literal["sort"] = "sort"
    column: str = "difficulty"
    """Column with the numbers to sort by."""
    descending: bool = False
    """Sort from largest to smallest."""

    def __call__(self, batch: TaskBatch) -> None:
        tasks = batch.tasks
        numbers = [to_finite_number(task.metadata.get(self.column)) for task in tasks]
        if None in numbers:
            count, task = numbers.count(None), tasks[numbers.index(None)]
            raise TasksetError(
                f"taskset {batch.report.taskset}: operator `sort`: {count} of {len(tasks)} tasks have no number in the "
                f"column {self.column} (first: task {task.id}); put the operator `difficulty` before it, or name "
                "another column"
            )
        sign = -1 if self.descending else 1
        order = sorted(range(len(tasks)), key=lambda index: sign * (numbers[index] or 0.0))
        batch.arrange([tasks[index] for index in order])


class SampleTasks(TaskOperatorSection):
    """Keeps a random subset of the tasks, in their original order."""

    name: Literal["sample"] = "sample"
    n: int = Field(ge=1)
    """Number of tasks to keep; all, if there are fewer."""
    seed: int = 0
    """Seed of the random choice."""

    def __call__(self, batch: TaskBatch) -> None:
        tasks = batch.tasks
        chosen = set(random.Random(self.seed).sample(range(len(tasks)), min(self.n, len(tasks))))
        for number, task in enumerate(tasks):
            if number not in chosen:
                batch.drop(task, "not sampled")
