"""Runs the run file's `taskset.pipeline`, with built-in and users' task operators."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from rollmill.config.section import register_section, section_from_signature
from rollmill.config.task_operators import TaskOperatorSection
from rollmill.data.operators.batch import TaskBatch, TaskOperatorReport, TaskReader
from rollmill.errors import RollmillError, TasksetError, user_code_location
from rollmill.registry import build_component
from rollmill.types import Task

Function = TypeVar("Function", bound=Callable[..., Any])


def task_operator(function: Function) -> Function:
    """Register a task operator under its name: `taskset: {pipeline: [{name: NAME, ...}]}`.

    The function takes one `rollmill.data.operators.TaskBatch` and returns nothing. It has to be deterministic, because
    a resumed run calls it again. Keyword-only parameters with a type and a default are keys of the run file.

    Raises ConfigError naming the parameter that lacks a type or a default.
    """
    register_section("task_operator", function.__name__, section_from_signature(function, TaskOperatorSection))
    return function


TaskOperator = Callable[[TaskBatch], None]


def run_task_pipeline(
    taskset: str, tasks: Sequence[Task], pipeline: Sequence[TaskOperatorSection], read: TaskReader
) -> tuple[list[Task], list[TaskOperatorReport]]:
    """Run a pipeline; returns its tasks and a report per operator.

    Args:
        taskset: name, for reports and errors.
        tasks: not changed; operators get copies.
        read: reads held-out tasks.

    Raises TasksetError: an operator raised, or left no task.
    """
    current = [copy.copy(task) for task in tasks]
    for task in current:
        task.metadata = dict(task.metadata)
    reports: list[TaskOperatorReport] = []
    for section in pipeline:
        report = TaskOperatorReport(taskset, section.name, len(current))
        batch = TaskBatch(current, report)
        try:
            build_component(section, read)(batch)
            batch.check()
        except RollmillError:
            raise
        except (Exception, SystemExit) as error:  # a user's code may raise anything
            place = user_code_location(error)
            where = f" at {place}" if place else ""
            raise TasksetError(
                f"taskset {taskset}: operator `{section.name}` raised {type(error).__name__}: {error}{where}; correct "
                "it, or take it out of taskset.pipeline"
            ) from error
        current = batch.tasks
        reports.append(report)
        if not current:
            lines = "".join(f"\n  {each}" for each in reports)
            raise TasksetError(f"taskset {taskset}: its pipeline leaves no task; loosen an operator{lines}")
    return current, reports
