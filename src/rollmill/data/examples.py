"""Selects the tasks that a stage learns from without rolling them out, and counts those that it leaves out."""

from __future__ import annotations

from dataclasses import replace

from rollmill.config.algorithms.base import AlgorithmOptions
from rollmill.config.algorithms.distillation import SelfDistill
from rollmill.config.describe import TaskCount
from rollmill.config.run import StageConfig
from rollmill.config.taskset import TasksetConfig
from rollmill.data.taskset import RejectedRow, Taskset
from rollmill.errors import TasksetError
from rollmill.types import Task


def select_examples(stage: StageConfig, taskset: Taskset) -> Taskset | None:
    """Returns the worked solutions, pairs or labelled completions of a taskset, if the stage learns from them.

    `rejected` has the tasks without one.
    """
    algorithm = stage.algorithm
    if "taskset" not in stage.offline_data.sources or not algorithm.uses_examples:
        return None
    if algorithm.uses_labels and not algorithm.uses_pairs:
        return _with_labels(taskset)
    needed = ("response", "rejected") if algorithm.uses_pairs else ("response",)
    found: list[Task] = []
    empty: list[RejectedRow] = []
    for task in taskset.tasks:
        missing = next((field for field in needed if getattr(task, field) is None), None)
        if missing is None:
            found.append(task)
        else:
            empty.append(RejectedRow(f"task {task.id}", f"its {missing} is empty", f"empty {missing}"))
    return taskset.with_tasks(found, empty)


def require_examples(stage: StageConfig, taskset: Taskset, found: Taskset | None) -> None:
    """Raises TasksetError if the stage has nothing else to learn from and `select_examples` found nothing."""
    if found is not None and not found.tasks and not set(stage.offline_data.sources) - {"taskset", "run"}:
        raise TasksetError(_no_examples(taskset, stage.algorithm))


def select_context(taskset: Taskset, algorithm: SelfDistill, config: TasksetConfig, notes: list[str]) -> Taskset:
    """Returns the tasks that have the context shown to the teacher; adds to `notes` how many have none.

    Raises TasksetError if some have none (on_bad_row: refuse), or all.
    """
    field = {"solution": "response", "answer": "answer"}.get(algorithm.context)
    if field is None:
        return taskset
    known = [task for task in taskset.tasks if getattr(task, field) is not None]
    missing = [
        RejectedRow(f"task {task.id}", f"no {field}", f"empty {field}")
        for task in taskset.tasks
        if getattr(task, field) is None
    ]
    if not missing:
        return taskset
    text = f"taskset {taskset.name}: {len(missing)} of {len(taskset.tasks)} tasks have no {field}"
    if not known or config.on_bad_row == "refuse":
        advice = "" if not known else ", or leave these tasks out by taskset.on_bad_row: skip"
        raise TasksetError(
            f"{text}, which algorithm self_distill shows the teacher (context: {algorithm.context}); name its column "
            f"in taskset.fields.{field}{advice}\n  {missing[0]}"
        )
    notes.append(f"{text}, which the teacher is to see, and were left out")
    return taskset.with_tasks(known, missing)


def count_tasks(stage: StageConfig, taskset: Taskset, examples: Taskset | None) -> TaskCount:
    """Counts what a stage learns from: its examples, its tasks, or both, with what was left out of each by reason."""
    if examples is not None and not stage.algorithm.uses_rollouts:
        return TaskCount(len(examples.tasks), examples.left_out())
    own = None if examples is None else TaskCount(len(examples.tasks), examples.left_out())
    return TaskCount(len(taskset.tasks), taskset.left_out(), own)


def _with_labels(taskset: Taskset) -> Taskset:
    """Splits tasks into single completions: a task with a better and a worse solution becomes two."""
    found: list[Task] = []
    empty: list[RejectedRow] = []
    for task in taskset.tasks:
        if task.response is not None and task.rejected is not None:
            found.append(replace(task, id=f"{task.id}/chosen", rejected=None))
            found.append(replace(task, id=f"{task.id}/rejected", response=None))
        elif task.response is not None or task.rejected is not None:
            found.append(task)
        else:
            empty.append(RejectedRow(f"task {task.id}", "its completion is empty", "empty completion"))
    return taskset.with_tasks(found, empty)


def _no_examples(tasks: Taskset, algorithm: AlgorithmOptions) -> str:
    if algorithm.uses_pairs:
        return (
            f"algorithm {algorithm.name} learns from preference pairs, but no task of {tasks.name} has both solutions; "
            "name their columns: taskset.fields.response (the better) and taskset.fields.rejected"
        )
    if algorithm.uses_labels:
        return (
            f"algorithm {algorithm.name} learns from completions that are desirable or undesirable, but no task of "
            f"{tasks.name} has one; give rows with prompt, completion and label (true or false), or name their "
            "columns: taskset.fields.response and taskset.fields.label"
        )
    return (
        f"algorithm {algorithm.name} imitates worked solutions, but no task of {tasks.name} has one; name "
        "the column that holds them: taskset.fields.response, or write taskset.response_template"
    )
