"""References that a reward could only fail on, found when the tasks are loaded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rollmill.config.rewards import ChartReward, CountReward, K12Reward, MathReward, RewardConfig, VQAReward
from rollmill.errors import ConfigError
from rollmill.types import Task

_COMPARING = (MathReward, K12Reward, CountReward, ChartReward, VQAReward)
"""Rewards that compare with the reference; for others an empty text may be meant."""
_NAMED = 3


def require_references(rewards: Iterable[RewardConfig], tasks: Sequence[Task], where: str) -> None:
    """Raise ConfigError where a reward that compares with the reference has a task whose reference is empty.

    Args:
        tasks: the tasks that the rewards judge.
        where: the section that they come from, for the message.
    """
    comparing = [reward for reward in rewards if isinstance(reward, _COMPARING)]
    if not comparing:
        return
    empty = [task.id for task in tasks if _is_judged(comparing[0], task) and _is_empty(_reference(comparing[0], task))]
    if empty:
        named = ", ".join(f"`{task}`" for task in empty[:_NAMED]) + (", ..." if len(empty) > _NAMED else "")
        raise ConfigError(
            f"{where}: {len(empty)} of {len(tasks)} tasks have an empty answer ({named}), which the reward "
            f"`{comparing[0].name}` cannot compare with; give an answer, or null where the reward does not apply"
        )


def _is_judged(reward: RewardConfig, task: Task) -> bool:
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
