"""Checks of the tasks' references, run when tasks are loaded: can the rewards use them?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rollmill.config.rewards import RewardConfig, RewardManagerConfig, reward_part_names
from rollmill.errors import ConfigError
from rollmill.rewards.builtin.chart import ChartReward
from rollmill.rewards.builtin.code import CodeReward
from rollmill.rewards.builtin.count import CountReward, reference_count
from rollmill.rewards.builtin.format import FormatReward
from rollmill.rewards.builtin.k12 import K12Reward
from rollmill.rewards.builtin.math import MathReward
from rollmill.rewards.builtin.tool_call import ToolCallReward, check_tools
from rollmill.rewards.builtin.vqa import VQAReward
from rollmill.rewards.text.json_schema import build_validator, schema_text
from rollmill.types import Task

_COMPARING = (MathReward, K12Reward, CountReward, ChartReward, VQAReward)
"""Rewards that compare with the reference; for others an empty text may be intended."""
_NAMED = 3
_TEST_COLUMNS = ("tests", "test", "test_list")
"""Columns that hold tests of code, see rewards/code/tests.py."""


def require_references(rewards: Iterable[RewardConfig], tasks: Sequence[Task], where: str) -> None:
    """Raise ConfigError if a reward that compares with the reference has a task with an empty one, `count` one
    without a number, or a reward with JSON Schemas one that it cannot use.

    Args:
        tasks: the tasks that the rewards score.
        where: the section of the run file that they come from, for the message.
    """
    rewards = list(rewards)
    _require_counts(rewards, tasks, where)
    _require_schemas(rewards, tasks, where)
    comparing = [reward for reward in rewards if isinstance(reward, _COMPARING)]
    if not comparing:
        return
    empty = [task.id for task in tasks if _applies(comparing[0], task) and _is_empty(_reference(comparing[0], task))]
    if empty:
        named = ", ".join(f"`{task}`" for task in empty[:_NAMED]) + (", ..." if len(empty) > _NAMED else "")
        raise ConfigError(
            f"{where}: {len(empty)} of {len(tasks)} tasks have an empty answer ({named}), which the reward "
            f"`{comparing[0].name}` cannot compare with; give an answer, or null where the reward does not apply"
        )


def _require_counts(rewards: Sequence[RewardConfig], tasks: Sequence[Task], where: str) -> None:
    """Raise ConfigError if `count` scores a task whose answer is no number, such as the letter of an option."""
    for name, reward in zip(reward_part_names(rewards), rewards, strict=True):
        if not isinstance(reward, CountReward):
            continue
        wrong: list[str] = []
        for task in tasks:
            is_scored = task.answer is not None and _applies(reward, task) and name in (task.rewards or [name])
            if not is_scored or _is_empty(task.answer):
                continue
            try:
                reference_count(task.answer)
            except ValueError:
                wrong.append(f"`{task.id}`: {task.answer!r:.40}")
        if wrong:
            named = ", ".join(wrong[:_NAMED]) + (", ..." if len(wrong) > _NAMED else "")
            raise ConfigError(
                f"{where}: {len(wrong)} of {len(tasks)} tasks have an answer that is no number of at least 0 "
                f"({named}), which the reward `{name}` cannot compare with; score them by another reward, in a domain "
                "of their own or named by row (taskset.fields.rewards), or give null where the reward does not apply"
            )


def _require_schemas(rewards: Sequence[RewardConfig], tasks: Sequence[Task], where: str) -> None:
    """Raise ConfigError if `tool_call`, or `format` with `schema_column`, has a task whose schemas it cannot use."""
    for name, reward in zip(reward_part_names(rewards), rewards, strict=True):
        column = reward.schema_column if isinstance(reward, FormatReward) else None
        if column is None and not isinstance(reward, ToolCallReward):
            continue
        known: set[tuple[str, str]] = set()
        for task in tasks:
            if name not in (task.rewards or [name]):
                continue
            try:
                if column is None:
                    check_tools(task, known)
                elif task.metadata.get(column) is not None:
                    build_validator(schema_text(task.metadata[column]))
            except ValueError as error:
                about = "" if column is None else f"column {column}: "
                raise ConfigError(f"{where}: task `{task.id}`, reward `{name}`: {about}{error}") from error


def require_verdicts(
    rewards: Sequence[RewardConfig], settings: RewardManagerConfig, tasks: Sequence[Task], where: str
) -> None:
    """Raise ConfigError if a task names rewards that there are not, or two rewards decide whether its answer is right.

    Args:
        tasks: the tasks that the rewards score.
        where: the section of the run file that they come from, for the message.
    """
    names = reward_part_names(rewards)
    deciding = [
        (name, each)
        for name, each in zip(names, rewards, strict=True)
        if each.decides and each.weight and not each.gate
    ]
    roles = {each.role for _, each in deciding}
    for task in tasks:
        unknown = [] if task.rewards is None else [name for name in task.rewards if name not in names]
        if unknown:
            raise ConfigError(
                f"{where}: task `{task.id}` names the reward `{unknown[0]}` (taskset.fields.rewards), and there are "
                f"{', '.join(names) or 'none'}; correct the row, or add that reward"
            )
        if settings.verdicts == "several" or len(deciding) < 2:
            continue
        scoring = [(name, each) for name, each in deciding if _applies(each, task) and name in (task.rewards or names)]
        by_role = [[name for name, each in scoring if each.role in (None, role)] for role in roles]
        both = max(by_role, key=len)
        if len(both) > 1:
            raise ConfigError(
                f"{where}: the rewards `{both[0]}` and `{both[1]}` both say whether the answer of task `{task.id}` is "
                "right, so a right one would earn both. Write tasks of different kinds as `domains` with their own "
                "rewards, name each row's rewards in a column (taskset.fields.rewards), or set judging.verdicts: "
                "several"
            )


def _applies(reward: RewardConfig, task: Task) -> bool:
    if isinstance(reward, CodeReward):
        return any(task.metadata.get(column) for column in _TEST_COLUMNS)
    column = task.metadata.get("vision")
    is_visual = isinstance(reward, CountReward | ChartReward | VQAReward)
    return not (is_visual and isinstance(column, Mapping) and reward.name not in column)


def _reference(reward: RewardConfig, task: Task) -> Any:
    column = task.metadata.get("k12")
    own = column.get("answer") if isinstance(reward, K12Reward) and isinstance(column, Mapping) else None
    return task.answer if own is None else own


def _is_empty(answer: Any) -> bool:
    if isinstance(answer, str):
        return not answer.strip()
    if isinstance(answer, list | tuple):
        return not answer or any(isinstance(each, str) and not each.strip() for each in answer)
    return isinstance(answer, Mapping) and not answer
