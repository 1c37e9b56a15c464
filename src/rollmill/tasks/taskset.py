"""A taskset: tasks in memory, and the rows that could not become tasks."""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import dataclass
from typing import Any

from rollmill.config.taskset import TasksetConfig
from rollmill.core.errors import TasksetError
from rollmill.core.types import Task
from rollmill.tasks.files import read_path
from rollmill.tasks.images import image_refs
from rollmill.tasks.programs import read_function, read_generator
from rollmill.tasks.record import BadRowError, Record, Records
from rollmill.tasks.rows import RowReader

log = logging.getLogger(__name__)

_NAMED = 5


@dataclass(frozen=True, slots=True)
class RejectedRow:
    """A row that did not become a task."""

    where: str  #: file:line, or the source and the row's number
    reason: str

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Taskset:
    """Tasks with different ids, in the source's order."""

    name: str
    tasks: list[Task]
    rejected: list[RejectedRow]

    def fingerprint(self) -> str:
        """Hex digest of ids, prompts, pictures, solutions and answers: equal for equal tasks, in any process.

        Of an answer that JSON does not hold only the type counts.
        """
        digest = hashlib.sha256()
        for task in self.tasks:
            pictures = [image.sha256 for image in image_refs(task.metadata)]
            parts = [task.id, task.prompt, task.response, task.rejected, task.answer, *pictures]
            digest.update(json.dumps(parts, default=lambda other: type(other).__name__, skipkeys=True).encode())
        return digest.hexdigest()[:16]


def load_taskset(config: TasksetConfig) -> Taskset:
    """Read the taskset that a `taskset` section describes.

    Raises:
        TasksetError: the source does not exist or cannot be read, there are no tasks, or (on_bad_row: refuse) rows
            cannot become tasks; the message names them.
        ConfigError: taskset.function names nothing that can be imported.
    """
    name = _name(config)
    if config.preset is not None and config.generator is not None:
        raise TasksetError("taskset.preset: a generator makes rows in its own layout; remove preset")
    reader = RowReader(config, name)
    tasks: list[Task] = []
    rejected: list[RejectedRow] = []
    places: dict[str, str] = {}
    for number, record in enumerate(_records(config)):
        try:
            task = _unique(reader.task(record, number), record, places)
        except BadRowError as error:
            rejected.append(RejectedRow(record.where, str(error)))
            continue
        tasks.append(task)
        if len(tasks) == config.limit:
            break
    _judge(name, config, tasks, rejected)
    return Taskset(name, tasks, rejected)


def _unique(task: Task, record: Record, places: dict[str, str]) -> Task:
    first = places.setdefault(task.id, record.where)
    if first is not record.where:
        raise BadRowError(f"the id {task.id} is taken by {first}")
    return task


def _records(config: TasksetConfig) -> Records:
    if config.path is not None:
        return read_path(config.path, config.split)
    if config.generator is not None:
        return read_generator(config.generator)
    assert config.function is not None
    return read_function(config.function, config.options)


def _name(config: TasksetConfig) -> str:
    if config.path is not None:
        stem = config.path.name if config.path.is_dir() else config.path.stem
        return f"{stem}/{config.split}" if config.split else stem
    if config.generator is not None:
        return config.generator.name
    assert config.function is not None
    return config.function.rpartition(":")[2]


def _judge(name: str, config: TasksetConfig, tasks: list[Task], rejected: list[RejectedRow]) -> None:
    total = len(tasks) + len(rejected)
    if rejected and config.on_bad_row == "refuse":
        advice = "correct them, or skip them by taskset.on_bad_row: skip"
        raise TasksetError(
            f"taskset {name}: {len(rejected)} of {total} rows cannot become tasks; {advice}\n{_first(rejected)}"
        )
    if not tasks:
        if rejected:
            raise TasksetError(f"taskset {name} has no tasks: all {total} rows were skipped\n{_first(rejected)}")
        raise TasksetError(f"taskset {name} is empty: {_source(config)} has no rows; give one that has")
    if rejected:
        log.warning("taskset %s: skipped %d of %d rows\n%s", name, len(rejected), total, _first(rejected))


def _source(config: TasksetConfig) -> Any:
    return config.path or config.function or config.generator


def _first(rejected: list[RejectedRow]) -> str:
    lines = [f"  {row}" for row in rejected[:_NAMED]]
    more = [f"  and {len(rejected) - _NAMED} more"] if len(rejected) > _NAMED else []
    return "\n".join(lines + more)
