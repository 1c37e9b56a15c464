"""What `decontaminate` compares training tasks with, unless the run file says: the stage's held-out tasks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from rollmill.config.rows import RowsSection
from rollmill.config.task_operators import DecontaminateTasks
from rollmill.config.taskset import TasksetConfig, TasksetSection

TasksetT = TypeVar("TasksetT", bound=TasksetSection)


def fill_decontamination_sets(taskset: TasksetConfig, evaluation: Sequence[TasksetConfig]) -> TasksetConfig:
    """The training taskset with `against` of every `decontaminate` filled in; the same object where none lacks it."""
    if not any(_lacking(part) for part in [taskset, *taskset.mix]):
        return taskset
    keys = set(RowsSection.model_fields)
    rows = [RowsSection.model_validate(part.model_dump(include=keys)) for held in evaluation for part in held.parts()]
    return _filled(taskset, rows).model_copy(update={"mix": [_filled(entry, rows) for entry in taskset.mix]})


def _lacking(section: TasksetSection) -> bool:
    return any(isinstance(each, DecontaminateTasks) and not each.against for each in section.pipeline)


def _filled(section: TasksetT, rows: list[RowsSection]) -> TasksetT:
    pipeline = [
        each.model_copy(update={"against": rows}) if isinstance(each, DecontaminateTasks) and not each.against else each
        for each in section.pipeline
    ]
    return section.model_copy(update={"pipeline": pipeline})
