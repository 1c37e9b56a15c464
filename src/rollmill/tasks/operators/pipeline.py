"""From the run file's `taskset.pipeline` to prepared tasks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

from rollmill.config.rows import RowsSection
from rollmill.config.task_operators import (
    CleanTasks,
    DecontaminateTasks,
    DeduplicateTasks,
    DifficultyOfTasks,
    FilterTasks,
    SampleTasks,
    SortTasks,
    TaskOperatorSection,
)
from rollmill.core.errors import RollmillError, TasksetError
from rollmill.core.types import Task
from rollmill.tasks.operators.batch import TaskBatch, TaskReport
from rollmill.tasks.operators.clean import clean
from rollmill.tasks.operators.contamination import decontaminate
from rollmill.tasks.operators.difficulty import difficulty
from rollmill.tasks.operators.duplicates import deduplicate
from rollmill.tasks.operators.filters import keep_matching
from rollmill.tasks.operators.selection import sample, sort
from rollmill.tasks.operators.user import made

Operator = Callable[[TaskBatch], None]
Reader = Callable[[RowsSection], list[Task]]


def prepare(
    taskset: str, tasks: Sequence[Task], pipeline: Sequence[TaskOperatorSection], read: Reader
) -> tuple[list[Task], list[TaskReport]]:
    """What comes out of a pipeline, and what each operator did.

    Args:
        taskset: name, for reports and errors.
        tasks: stay as they are; operators get copies.
        read: reads held-out tasks.

    Raises TasksetError: an operator raised, or leaves no task.
    """
    current = [copy.copy(task) for task in tasks]
    for task in current:
        task.metadata = dict(task.metadata)
    reports: list[TaskReport] = []
    for section in pipeline:
        report = TaskReport(taskset, section.name, len(current))
        batch = TaskBatch(current, report)
        try:
            _operator(section, read)(batch)
            batch.check()
        except RollmillError:
            raise
        except Exception as error:  # a user's code may raise anything
            raise TasksetError(
                f"taskset {taskset}: operator `{section.name}` raised {type(error).__name__}: {error}; correct it, or "
                "take it out of taskset.pipeline"
            ) from error
        current = batch.tasks
        reports.append(report)
        if not current:
            lines = "".join(f"\n  {each}" for each in reports)
            raise TasksetError(f"taskset {taskset}: its pipeline leaves no task; loosen an operator{lines}")
    return current, reports


def _operator(section: TaskOperatorSection, read: Reader) -> Operator:
    if type(section).function is not None:
        return made(section)
    match section:
        case CleanTasks():
            return clean(section)
        case FilterTasks():
            return keep_matching(section)
        case DeduplicateTasks():
            return deduplicate(section)
        case DecontaminateTasks():
            return decontaminate(section, [task for rows in section.against for task in read(rows)])
        case DifficultyOfTasks():
            return difficulty(section)
        case SortTasks():
            return sort(section)
        case SampleTasks():
            return sample(section)
    raise AssertionError(f"no operator is built from {type(section).__name__}")
