"""Operators that drop experiences or mask them in the loss."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from rollmill.config.operators.filters import (
    GroupVarianceFilter,
    InvalidRewardFilter,
    LengthFilter,
    RewardFilter,
    TruncationOperator,
)
from rollmill.pipelines.batch import Batch, is_success, response_length, reward_value, rollouts_of
from rollmill.pipelines.pipeline import Operator
from rollmill.pipelines.reward_updates import init_reward_part, set_reward
from rollmill.types import Experience, StopReason, first_per_rollout

_EQUAL = 1e-9
"""Tolerance for equal rewards, because sums of parts have rounding errors."""


def reward_filter(options: RewardFilter) -> Operator:
    """Drops rollouts whose reward is outside the bounds; keeps those without a reward."""

    def apply(batch: Batch) -> None:
        for experience in rollouts_of(batch):
            value = reward_value(experience, options.part)
            if value is None:
                continue
            if options.at_least is not None and value < options.at_least:
                batch.drop(experience, "reward too low")
            elif options.at_most is not None and value > options.at_most:
                batch.drop(experience, "reward too high")

    return apply


def length_filter(options: LengthFilter) -> Operator:
    """Drops experiences with too few or too many tokens of the policy, or of an imitated answer."""

    def apply(batch: Batch) -> None:
        for experience in batch.experiences:
            length = response_length(experience)
            if options.at_least is not None and length < options.at_least:
                batch.drop(experience, "too short")
            elif options.at_most is not None and length > options.at_most:
                batch.drop(experience, "too long")

    return apply


def group_variance(options: GroupVarianceFilter) -> Operator:
    """Drops groups without a training signal: dynamic sampling of DAPO (arXiv:2503.14476, eq. 11).

    With roles, each role's part of a group is a group of its own.
    """

    def apply(batch: Batch) -> None:
        for group in batch.compared():
            why = _drop_reason(options, group)
            if why is not None:
                for experience in group:
                    batch.drop(experience, why)

    return apply


def _drop_reason(options: GroupVarianceFilter, group: Sequence[Experience]) -> str | None:
    """Reason to drop a group, or None. Bounds on the mean come first, because they are more specific."""
    values = [value for each in first_per_rollout(group) if (value := _value(options, each)) is not None]
    if not values:
        return "not judged"
    mean, deviation = float(np.mean(values)), float(np.std(values))
    if options.at_least is not None and mean < options.at_least - _EQUAL:
        return "mean too low"
    if options.at_most is not None and mean > options.at_most + _EQUAL:
        return "mean too high"
    if max(values) - min(values) <= _EQUAL:
        return "all equal"
    return "too alike" if deviation <= options.std_above else None


def _value(options: GroupVarianceFilter, experience: Experience) -> float | None:
    if options.threshold is None:
        return reward_value(experience, options.part)
    success = is_success(experience, options.part, options.threshold)
    return None if success is None else float(success)


def invalid_reward(options: InvalidRewardFilter) -> Operator:
    """Drops rollouts without a finite reward, or with an unwanted outcome."""
    unwanted = set(options.outcomes)

    def apply(batch: Batch) -> None:
        for experience in rollouts_of(batch):
            if unwanted.intersection(experience.info.get("outcomes", {}).values()):
                batch.drop(experience, "unwanted outcome")
            elif experience.reward is None:
                batch.drop(experience, "no reward")
            elif not math.isfinite(experience.reward):
                batch.drop(experience, "not finite")

    return apply


def truncated(options: TruncationOperator) -> Operator:
    """Masks or drops rollouts that were truncated at the length limit, or changes their reward."""

    def apply(batch: Batch) -> None:
        if options.then == "reward":
            init_reward_part(batch)
        for experience in rollouts_of(batch):
            if experience.stop_reason is not StopReason.LENGTH:
                continue
            if options.then == "drop":
                batch.drop(experience, "cut off")
            elif options.then == "reward":
                set_reward(batch, experience, options.reward, "cut off reward")
            else:
                mask_tokens(experience)
                batch.change(experience, "masked")

    return apply


def mask_tokens(experience: Experience) -> None:
    """Mask all tokens of an experience in the loss. Its reward still counts in the group's baseline.

    `info["masked"]` keeps the version of its oldest token.
    """
    experience.info.setdefault("masked", experience.oldest_version)
    experience.action_mask = np.zeros_like(experience.action_mask)
    experience.logprobs = np.zeros_like(experience.logprobs)
    experience.versions = np.full_like(experience.versions, -1)
