"""Checks of the tasks' references, run when tasks are loaded: can the rewards use them?"""

from __future__ import annotations

from collections.abc import Sequence

from rollmill.config.rewards import Reward, RewardManagerConfig, reward_part_names
from rollmill.errors import ConfigError
from rollmill.rewards.base import is_empty_answer
from rollmill.types import Task

_NAMED = 3
"""Tasks that an error names."""


def require_references(rewards: Sequence[Reward], tasks: Sequence[Task], where: str) -> None:
    """Raise ConfigError if a reward that compares with the reference has a task with an empty one, or a reward cannot
    score a task.

    Args:
        tasks: the tasks that the rewards score.
        where: the section of the run file that they come from, for the message.
    """
    named_rewards = list(zip(reward_part_names(rewards), rewards, strict=True))
    for name, reward in named_rewards:
        try:
            reward.check_tasks(tasks, name)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error
    for name, reward in named_rewards:
        scored = reward.scored_tasks(tasks, name) if reward.compares_answers else []
        empty = [f"`{task.id}`" for task in scored if is_empty_answer(reward.reference_of(task))]
        if empty:
            named = ", ".join(empty[:_NAMED]) + (", ..." if len(empty) > _NAMED else "")
            raise ConfigError(
                f"{where}: {len(empty)} of {len(tasks)} tasks have an empty answer ({named}), which the reward "
                f"`{reward.name}` cannot compare with; give an answer, or null where the reward does not apply"
            )


def require_verdicts(
    rewards: Sequence[Reward], settings: RewardManagerConfig, tasks: Sequence[Task], where: str
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
        scoring = [(name, each) for name, each in deciding if each.applies_to(task) and name in (task.rewards or names)]
        by_role = [[name for name, each in scoring if each.role in (None, role)] for role in roles]
        both = max(by_role, key=len)
        if len(both) > 1:
            raise ConfigError(
                f"{where}: the rewards `{both[0]}` and `{both[1]}` both say whether the answer of task `{task.id}` is "
                "right, so a right one would earn both. Write tasks of different kinds as `domains` with their own "
                "rewards, name each row's rewards in a column (taskset.fields.rewards), or set "
                "reward_settings.verdicts: several"
            )
