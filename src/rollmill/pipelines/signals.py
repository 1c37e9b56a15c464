"""Operators that tell other components about a group: how soon to learn from it again, how hard its task is."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rollmill.config.operators import ReplayPriority, SuccessRateOperator
from rollmill.pipelines.accessors import is_success, response_length, reward_value
from rollmill.pipelines.batch import Batch
from rollmill.pipelines.pipeline import Operator
from rollmill.types import Experience, first_per_rollout


def priority(options: ReplayPriority) -> Operator:
    """Writes `info["priority"]` of every rollout: that of its group."""

    def apply(batch: Batch) -> None:
        for group in batch.groups().values():
            value = max(_priority(options, group, batch), options.floor)
            for experience in group:
                experience.info["priority"] = value
            batch.note("set")

    return apply


def _priority(options: ReplayPriority, group: Sequence[Experience], batch: Batch) -> float:
    if options.by == "length":
        return float(np.mean([response_length(each) for each in group])) / batch.context.max_new_tokens
    if options.by == "recency":
        return float(batch.context.step)
    rewards = [reward for each in first_per_rollout(group) if (reward := _reward(options, each)) is not None]
    if not rewards:
        return 0.0
    mean = float(np.mean(rewards))
    values = {
        "variance": float(np.var(rewards)),
        "balance": 1 - 2 * abs(mean - 0.5),
        "reward": mean,
        "failure": 1 - mean,
    }
    return values[options.by]


def _reward(options: ReplayPriority, experience: Experience) -> float | None:
    if options.threshold is None:
        return reward_value(experience, options.part)
    success = is_success(experience, options.part, options.threshold)
    return None if success is None else float(success)


def success_rate(options: SuccessRateOperator) -> Operator:
    """Tells the sampler which rollouts of a task succeeded; those that were not judged are left out."""

    def apply(batch: Batch) -> None:
        for group in batch.groups().values():
            known = [is_success(each, options.part, options.threshold) for each in first_per_rollout(group)]
            successes = [float(success) for success in known if success is not None]
            if successes:
                batch.context.observe(group[0].task_id, successes)
                batch.note("observed")

    return apply
