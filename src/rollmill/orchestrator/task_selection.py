"""Selects the tasks of a stage that fit the model: for rollouts, demonstrations and evaluation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rollmill.config.describe import evaluation_key
from rollmill.config.run import StageConfig
from rollmill.config.taskset import TasksetConfig
from rollmill.data import RejectedRow, Taskset, encode_demonstration, encode_prompt
from rollmill.data.examples import require_examples, select_context, select_examples
from rollmill.data.images import require_seen
from rollmill.data.taskset import with_switches
from rollmill.errors import TasksetError
from rollmill.models.load import PolicyModel
from rollmill.models.vision import picture_processor
from rollmill.types import Task

_NAMED = 5
_ADDED = 16


@dataclass(frozen=True, slots=True)
class StageTasks:
    """Tasks of one stage; every prompt and demonstration fits the model's context."""

    training: Taskset  #: training tasks; `rejected` has the rows and tasks left out
    examples: Taskset | None  #: demonstrations, if the algorithm imitates; `rejected` has the tasks without one, too
    held_out: dict[str, list[Task]]  #: evaluated tasks, by the name of their set
    notes: list[str]  #: messages on the pipeline and on tasks left out


def select_tasks(
    config: StageConfig, policy: PolicyModel, training: Taskset, held_out: Mapping[str, Taskset]
) -> StageTasks:
    """Select a stage's tasks from its loaded tasksets.

    A prompt must leave room for one new token, a demonstration must fit as a whole. Others are left out and reported
    (on_bad_row: skip).

    Raises:
        TasksetError: prompts or demonstrations are too long (on_bad_row: refuse), or nothing is left.
        ConfigError: tasks have pictures, and the policy does not see them.
    """
    algorithm, notes = config.algorithm, [str(report) for report in training.reports]
    switches, key = config.rollout.chat_template_kwargs, f"stage {config.name}: rollout.chat_template_kwargs"
    if switches:
        training = training.with_tasks(with_switches(training.tasks, switches, key, training.name), [])
    if config.taskset is not None:
        _require_seen(config.taskset, training, policy, f"stage {config.name}: taskset")
    examples = select_examples(config, training)
    require_examples(config, training, examples)
    if examples is not None and examples.tasks:
        measure = _pair if algorithm.uses_pairs or algorithm.uses_labels else _demonstration
        examples = _keep_fitting(examples, config.required_taskset, policy, measure, notes)
        desirable = sum(task.response is not None for task in examples.tasks)
        if text := algorithm.describe_imbalance(desirable, len(examples.tasks) - desirable):
            notes.append(f"taskset {examples.name}: {text}")
    if algorithm.self_teacher is not None:
        training = select_context(training, algorithm.self_teacher, config.required_taskset, notes)
    if algorithm.uses_rollouts and config.workflow.uses_tasks:
        training = _keep_fitting(training, config.required_taskset, policy, _prompt, notes)
    return StageTasks(training, examples, select_held_out(config, policy, held_out, notes), notes)


def select_held_out(
    config: StageConfig, policy: PolicyModel, held_out: Mapping[str, Taskset], notes: list[str]
) -> dict[str, list[Task]]:
    """Select the tasks of every evaluated set, by its name; adds to `notes` what was left out.

    Raises like `select_tasks`.
    """
    evaluated: dict[str, list[Task]] = {}
    for name, each in (config.evaluation.all_sets() if config.evaluation is not None else {}).items():
        where = f"stage {config.name}: {evaluation_key(name)}.taskset"
        _require_seen(each.taskset, held_out[name], policy, where)
        first = held_out[name].with_tasks(held_out[name].tasks[: each.limit], [])
        switches = config.for_evaluation(each).rollout.chat_template_kwargs
        if switches and any(not isinstance(task.prompt, str) for task in first.tasks):
            first = first.with_tasks(with_switches(first.tasks, switches, "rollout.chat_template_kwargs", name), [])
        evaluated[name] = _keep_fitting(first, each.taskset, policy, _prompt, notes).tasks
    return evaluated


def _require_seen(config: TasksetConfig, taskset: Taskset, policy: PolicyModel, where: str) -> None:
    """Raise ConfigError unless the policy sees the pictures of these tasks; see `require_seen`."""
    processor = picture_processor(policy.model)
    single = processor is not None and processor.single_prompt
    require_seen(config, taskset.tasks, processor is not None, where, single_prompt=single)


_Measure = Callable[[Task, PolicyModel], tuple[str, int, int]]
"""Measures a task: which text, its tokens, and how many may be."""


def _prompt(task: Task, policy: PolicyModel) -> tuple[str, int, int]:
    return "prompt", len(encode_prompt(task, policy.tokenizer)), policy.context - 1


def _demonstration(task: Task, policy: PolicyModel) -> tuple[str, int, int]:
    return "demonstration", len(encode_demonstration(task, policy.tokenizer, 0)[0]), policy.context


def _pair(task: Task, policy: PolicyModel) -> tuple[str, int, int]:
    """Measure the longer of its solutions; a labelled completion has only one."""
    solutions = [each for each in (False, True) if (task.rejected if each else task.response) is not None]
    longer = max(len(encode_demonstration(task, policy.tokenizer, 0, rejected=each)[0]) for each in solutions)
    return "pair" if len(solutions) == 2 else "completion", longer, policy.context


def _keep_fitting(
    taskset: Taskset, config: TasksetConfig, policy: PolicyModel, measure: _Measure, notes: list[str]
) -> Taskset:
    fit: list[Task] = []
    long: list[RejectedRow] = []
    for task in taskset.tasks:
        if _surely_fits(task, policy.context):
            fit.append(task)
            continue
        what, tokens, room = measure(task, policy)
        if tokens <= room:
            fit.append(task)
        else:
            reason = f"its {what} has {tokens} tokens, and {room} fit"
            long.append(RejectedRow(f"task {task.id}", reason, f"{what} too long"))
    if not long:
        return taskset
    text = (
        f"taskset {taskset.name}: {len(long)} of {len(taskset.tasks)} {what}s do not fit the model's context of "
        f"{policy.context} tokens"
    )
    lines = [str(row) for row in long[:_NAMED]]
    lines += [f"and {len(long) - _NAMED} more"] if len(long) > _NAMED else []
    named = "".join(f"\n  {line}" for line in lines)
    if config.on_bad_row == "refuse" or not fit:
        advice = "shorten them or use a model with a longer context"
        advice += "" if not fit else ", or leave them out by taskset.on_bad_row: skip"
        raise TasksetError(f"{text}; {advice}{named}")
    notes.append(f"{text} and were left out{named}")
    return taskset.with_tasks(fit, long)


def _surely_fits(task: Task, context: int) -> bool:
    """True if it has too few bytes to be too long, which saves encoding most tasks.

    A token stands for at least one byte, apart from the few that tokenizers add at the ends.
    """
    if not isinstance(task.prompt, str):
        return False
    longest = max(len((text or "").encode()) for text in (task.response, task.rejected))
    return len(task.prompt.encode()) + longest + _ADDED < context
