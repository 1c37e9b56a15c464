"""Operators that shape rewards, set replay priorities and report success rates."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rollmill.config.operators.shaping import (
    DiversityBonus,
    LengthShaping,
    OverlongPenalty,
    RepetitionPenalty,
    ReplayPriority,
    RewardScaling,
    SuccessRateOperator,
)
from rollmill.pipelines.batch import Batch, is_success, response_ids, response_length, reward_value, rollouts_of
from rollmill.pipelines.deduplication import normalize_whitespace
from rollmill.pipelines.pipeline import Operator
from rollmill.pipelines.reward_updates import add_reward, init_reward_part, set_reward
from rollmill.rewards.base import find_answer
from rollmill.rewards.builtin.length import kimi_length_scores, soft_overlong_penalty
from rollmill.rewards.builtin.repetition import repetition_share
from rollmill.types import Experience, first_per_rollout, split_by_role


def length_reward(options: LengthShaping) -> Operator:
    """Adds Kimi k1.5's length reward within each group (`kimi_length_scores`); ignores experiences without a reward."""

    def apply(batch: Batch) -> None:
        if batch.context.version < options.warmup_steps:
            batch.note("warm-up")
            return
        init_reward_part(batch)
        for group in batch.compared():
            known = [each for each in group if reward_value(each, None) is not None]
            correct = [is_success(each, options.part, options.threshold) for each in known]
            shares = kimi_length_scores([response_length(each) for each in known], correct) if known else []
            for experience, share in zip(known, shares, strict=True):
                add_reward(batch, experience, options.weight * (share or 0.0), "shaped")

    return apply


def overlong_penalty(options: OverlongPenalty) -> Operator:
    """Adds DAPO's soft overlong punishment (`soft_overlong_penalty`)."""

    def apply(batch: Batch) -> None:
        longest = options.longest or batch.context.max_new_tokens
        buffer = options.buffer or max(longest // 5, 1)
        init_reward_part(batch)
        for experience in _scored(batch):
            add_reward(
                batch,
                experience,
                options.weight * soft_overlong_penalty(response_length(experience), longest, buffer),
                "shaped",
            )

    return apply


def repetition_penalty(options: RepetitionPenalty) -> Operator:
    """Subtracts the share of repeated text (`repetition_share`)."""

    def apply(batch: Batch) -> None:
        init_reward_part(batch)
        for experience in _scored(batch):
            penalty, _ = repetition_share(
                response_ids(experience), options.ngram, options.free, options.loop_times, options.loop_tokens
            )
            add_reward(batch, experience, -options.weight * penalty, "shaped")

    return apply


def diversity(options: DiversityBonus) -> Operator:
    """Adds a bonus to successes for their mean distance to the other completions of the group."""

    def apply(batch: Batch) -> None:
        init_reward_part(batch)
        for group in batch.compared():
            distances = _distances(options, group)
            for experience, distance in zip(group, distances, strict=True):
                scored = reward_value(experience, None) is not None
                good = scored and is_success(experience, options.part, options.threshold)
                add_reward(batch, experience, options.weight * distance if good else 0.0, "shaped")

    return apply


def _distances(options: DiversityBonus, group: Sequence[Experience]) -> list[float]:
    """Mean distance of each completion to the others, from 0 to 1; 0 for a group of one."""
    if len(group) < 2:
        return [0.0] * len(group)
    if options.by == "answer":
        answers = [_answer(each, options.after) for each in group]
        return [1 - (answers.count(own) - 1) / (len(group) - 1) for own in answers]
    sets = [_ngrams(response_ids(each).tolist(), options.ngram) for each in group]
    sums = [sum(_jaccard_distance(own, other) for other in sets) for own in sets]
    return [total / (len(group) - 1) for total in sums]


def _answer(experience: Experience, after: str | None) -> str:
    """The answer for comparison; empty if there is none."""
    found = find_answer(experience, after)
    return "" if found is None else normalize_whitespace(found)


def _ngrams(ids: list[int], n: int) -> set[tuple[int, ...]]:
    """The n-grams; all tokens as one if there are fewer than n."""
    return {tuple(ids[start : start + n]) for start in range(max(len(ids) - n, 0) + 1)}


def _jaccard_distance(one: set[tuple[int, ...]], other: set[tuple[int, ...]]) -> float:
    return 1 - len(one & other) / len(one | other)


def scale(options: RewardScaling) -> Operator:
    """Rescales rewards: reward * factor + offset, clipped to the bounds."""

    def apply(batch: Batch) -> None:
        init_reward_part(batch)
        for experience in _scored(batch):
            assert experience.reward is not None
            value = experience.reward * options.factor + options.offset
            if options.clip is not None:
                value = min(max(value, options.clip[0]), options.clip[1])
            set_reward(batch, experience, value, "scaled")

    return apply


def _scored(batch: Batch) -> list[Experience]:
    return [experience for experience in rollouts_of(batch) if reward_value(experience, None) is not None]


def priority(options: ReplayPriority) -> Operator:
    """Sets `info["priority"]` of every rollout to the replay priority of its group, with roles the mean of theirs."""

    def apply(batch: Batch) -> None:
        for group in batch.groups().values():
            own = [_priority(options, each, batch) for each in split_by_role(group)]
            value = max(float(np.mean(own)), options.floor)
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
    """Reports the successes of a task's rollouts to the sampler, except those without a reward.

    Of several roles, the first that has successes and failures counts.
    """

    def apply(batch: Batch) -> None:
        for group in batch.groups().values():
            by_role = [_successes_of(options, own) for own in split_by_role(group)]
            if successes := max(by_role, key=lambda own: len(set(own))):
                batch.context.observe(group[0].task_id, successes)
                batch.note("observed")

    return apply


def _successes_of(options: SuccessRateOperator, experiences: Sequence[Experience]) -> list[float]:
    known = [is_success(each, options.part, options.threshold) for each in first_per_rollout(experiences)]
    return [float(success) for success in known if success is not None]
