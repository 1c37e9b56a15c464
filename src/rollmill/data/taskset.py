"""Loads tasksets: tasks in memory, with the rows and tasks that were left out."""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rollmill.config.hub import reference_of
from rollmill.config.rows import RowsSection
from rollmill.config.samplers import SamplerSection
from rollmill.config.taskset import MixEntry, TasksetConfig, TasksetSection
from rollmill.data.generators import call_row_function, generate_rows
from rollmill.data.harbor import read_harbor
from rollmill.data.images import image_refs_of
from rollmill.data.layouts import RESPONSE_MESSAGES, SWITCHES
from rollmill.data.operators.batch import TaskOperatorReport
from rollmill.data.operators.pipeline import run_task_pipeline
from rollmill.data.readers import BadRowError, SourceRow, SourceRows, read_path
from rollmill.data.task_builder import TaskBuilder
from rollmill.errors import TasksetError
from rollmill.types import Task

log = logging.getLogger(__name__)

_NAMED = 5


@dataclass(frozen=True, slots=True)
class RejectedRow:
    """A row that did not become a task."""

    where: str  #: file:line, or the source and the row's number
    reason: str
    kind: str = "bad row"  #: the reason in a few words, by which rows are counted

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}"


@dataclass(frozen=True, slots=True)
class MixtureComponent:
    """One taskset of a mixture; its tasks have its name as `task.taskset`."""

    name: str
    weight: float
    sampler: SamplerSection


@dataclass(frozen=True, slots=True)
class Taskset:
    """Tasks with unique ids, in the source's order."""

    name: str
    tasks: list[Task]
    rejected: list[RejectedRow]  #: rows that could not become tasks, and tasks that the pipeline dropped
    reports: list[TaskOperatorReport] = field(default_factory=list)  #: one per operator of the pipeline
    mixed: tuple[MixtureComponent, ...] = ()  #: empty unless the taskset is a mixture

    def with_tasks(self, tasks: list[Task], rejected: list[RejectedRow]) -> Taskset:
        """Copy of the taskset with only `tasks`, and `rejected` added to the rows left out."""
        return replace(self, tasks=tasks, rejected=[*self.rejected, *rejected])

    def left_out(self) -> dict[str, int]:
        """Numbers of rows and tasks left out, by reason."""
        return dict(Counter(row.kind for row in self.rejected))

    def fingerprint(self) -> str:
        """Hex digest of ids, prompts, images, solutions and answers: equal for equal tasks, in any process.

        For an answer that is not JSON, only its type counts.
        """
        digest = hashlib.sha256()
        for task in self.tasks:
            pictures = [image.sha256 for image in image_refs_of(task.metadata)]
            parts = [task.id, task.prompt, task.response, task.rejected, task.answer, *pictures]
            parts += [] if task.rewards is None else [task.rewards]
            parts += [] if task.workflow is None else [{"workflow": task.workflow}]
            parts += [{key: task.metadata[key]} for key in (SWITCHES, RESPONSE_MESSAGES) if key in task.metadata]
            digest.update(json.dumps(parts, default=lambda other: type(other).__name__, skipkeys=True).encode())
        return digest.hexdigest()[:16]


def load_taskset(config: TasksetConfig) -> Taskset:
    """Read the taskset of a `taskset` section, and run its pipeline.

    Raises:
        TasksetError: the source does not exist or cannot be read, there are no tasks, (on_bad_row: refuse) rows
            cannot become tasks, or an operator fails or leaves no task; the message names them.
        ConfigError: taskset.function cannot be imported.
    """
    if not config.mix:
        return _prepared(read_tasks(config), config)
    parts = [_entry(entry) for entry in config.mix]
    whole = Taskset(
        "+".join(part.name for part in parts),
        [task for part in parts for task in part.tasks],
        [row for part in parts for row in part.rejected],
        [report for part in parts for report in part.reports],
        tuple(MixtureComponent(entry.name, entry.weight, entry.sampler) for entry in config.mix),
    )
    return _prepared(whole, config)


def read_tasks(config: RowsSection) -> Taskset:
    """Read rows of one source as tasks; see `load_taskset`."""
    name = _name(config)
    if config.preset is not None and config.generator is not None:
        raise TasksetError("taskset.preset: a generator makes rows in its own layout; remove preset")
    reader = TaskBuilder(config, name)
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
    _check_rows(name, config, tasks, rejected)
    with_switches(tasks, config.chat_template_kwargs, "taskset.chat_template_kwargs", name)
    return Taskset(name, tasks, rejected)


def with_switches(tasks: Sequence[Task], switches: Mapping[str, Any], key: str, name: str) -> list[Task]:
    """Give the chats among tasks these variables of the chat template, where they have no other values for them.

    Raises TasksetError if there are variables and no chats; it names `key`, which they come from, and the taskset.
    """
    if switches and all(isinstance(task.prompt, str) for task in tasks):
        raise TasksetError(
            f"{key}: no prompt of {name} is a chat, so no chat template is used; write taskset.chat: true, or remove "
            "this key"
        )
    if not switches:
        return list(tasks)
    return [
        task
        if isinstance(task.prompt, str)
        else replace(task, metadata={**task.metadata, SWITCHES: {**switches, **task.metadata.get(SWITCHES, {})}})
        for task in tasks
    ]


def _entry(entry: MixEntry) -> Taskset:
    """Load one taskset of a mixture; the entry's name becomes the taskset's, and a prefix of its tasks' ids."""
    rows = read_tasks(entry)
    tasks = [replace(task, id=f"{entry.name}/{task.id}", taskset=entry.name) for task in rows.tasks]
    return _prepared(Taskset(entry.name, tasks, rows.rejected), entry)


def _prepared(taskset: Taskset, config: TasksetSection) -> Taskset:
    if not config.pipeline:
        return taskset
    tasks, reports = run_task_pipeline(
        taskset.name, taskset.tasks, config.pipeline, read=lambda rows: read_tasks(rows).tasks
    )
    dropped = [
        RejectedRow(f"task {id}", f"{report.operator}: {why}", f"{report.operator}: {why}")
        for report in reports
        for id, why in report.dropped.items()
    ]
    for report in reports:
        log.info("%s", report)
    return replace(taskset.with_tasks(tasks, dropped), reports=[*taskset.reports, *reports])


def _unique(task: Task, record: SourceRow, places: dict[str, str]) -> Task:
    first = places.setdefault(task.id, record.where)
    if first is not record.where:
        raise BadRowError(f"the id {task.id} is already used by {first}")
    return task


def _records(config: RowsSection) -> SourceRows:
    if config.path is not None:
        return read_path(config.path, config.split, config.subset)
    if config.generator is not None:
        return generate_rows(config.generator)
    if config.harbor is not None:
        return read_harbor(config.harbor)
    assert config.function is not None
    return call_row_function(config.function, config.options)


def _name(config: RowsSection) -> str:
    if config.path is not None:
        reference = reference_of(config.path)
        stem = config.path.name if config.path.is_dir() else config.path.stem
        stem = stem if reference is None else reference.id.rpartition("/")[2]
        return f"{stem}/{config.split}" if config.split else stem
    if config.generator is not None:
        return config.generator.name
    if config.harbor is not None:
        return config.harbor.name
    assert config.function is not None
    return config.function.rpartition(":")[2]


def _check_rows(name: str, config: RowsSection, tasks: list[Task], rejected: list[RejectedRow]) -> None:
    """Log skipped rows. Raises TasksetError if there are no tasks, or bad rows that may not be skipped."""
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


def _source(config: RowsSection) -> Any:
    return config.path or config.function or config.harbor or config.generator


def _first(rejected: list[RejectedRow]) -> str:
    lines = [f"  {row}" for row in rejected[:_NAMED]]
    more = [f"  and {len(rejected) - _NAMED} more"] if len(rejected) > _NAMED else []
    return "\n".join(lines + more)
