"""Operators that drop experiences or mask them in the loss."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal, Self, TypeVar

import numpy as np
from pydantic import Field, model_validator

from rollmill.config.operators import ALL_SOURCES, OperatorSection, RewardOperatorSection
from rollmill.pipelines.batch import Batch, is_success, response_length, reward_value, rollouts_of
from rollmill.pipelines.reward_updates import init_reward_part, set_reward
from rollmill.types import Experience, StopReason, first_per_rollout

if TYPE_CHECKING:
    from rollmill.config.run import StageConfig

FilterT = TypeVar("FilterT", bound=OperatorSection)
_EQUAL = 1e-9
"""Tolerance for equal rewards, because sums of parts have rounding errors."""


class RewardFilter(RewardOperatorSection):
    """Keeps completions whose reward lies within bounds; completions without a reward are kept."""

    drops = True
    name: Literal["reward_filter"] = "reward_filter"
    at_least: float | None = None
    """Drop completions with a lower reward."""
    at_most: float | None = None
    """Drop completions with a higher reward."""

    @model_validator(mode="after")
    def _bounded(self) -> Self:
        return _some_bound(self, self.at_least, self.at_most)

    def __call__(self, batch: Batch) -> None:
        for experience in rollouts_of(batch):
            value = reward_value(experience, self.part)
            if value is None:
                continue
            if self.at_least is not None and value < self.at_least:
                batch.drop(experience, "reward too low")
            elif self.at_most is not None and value > self.at_most:
                batch.drop(experience, "reward too high")


class LengthFilter(OperatorSection):
    """Keeps completions, demonstrations and pairs whose length in tokens lies within bounds."""

    drops = True
    handles = ALL_SOURCES
    name: Literal["length_filter"] = "length_filter"
    at_least: int | None = Field(None, ge=0)
    """Drop shorter completions."""
    at_most: int | None = Field(None, ge=0)
    """Drop longer completions."""

    @model_validator(mode="after")
    def _bounded(self) -> Self:
        return _some_bound(self, self.at_least, self.at_most)

    def __call__(self, batch: Batch) -> None:
        for experience in batch.experiences:
            length = response_length(experience)
            if self.at_least is not None and length < self.at_least:
                batch.drop(experience, "too short")
            elif self.at_most is not None and length > self.at_most:
                batch.drop(experience, "too long")


class GroupVarianceFilter(RewardOperatorSection):
    """Keeps groups whose completions earn sufficiently different rewards (dynamic sampling of DAPO).

    Other groups are dropped as a whole, and the run rolls out other tasks in their place.
    """

    drops = True
    compares = True
    name: Literal["group_variance"] = "group_variance"
    threshold: float | None = None
    """Compare successes instead of rewards: 1 for at least this, else 0."""
    std_above: float = Field(0.0, ge=0)
    """Drop groups whose (population) standard deviation is at most this; 0: groups of equal rewards."""
    at_least: float | None = None
    """Drop groups with a lower mean reward, or with `threshold` a lower success rate."""
    at_most: float | None = None
    """Drop groups with a higher one."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        return _in_order(self, self.at_least, self.at_most)

    def __call__(self, batch: Batch) -> None:
        """Drop groups without a training signal (arXiv:2503.14476, eq. 11); with roles, each role's part of a group is
        a group of its own."""
        for group in batch.compared():
            why = self._drop_reason(group)
            if why is not None:
                for experience in group:
                    batch.drop(experience, why)

    def _drop_reason(self, group: Sequence[Experience]) -> str | None:
        """Reason to drop a group, or None. Bounds on the mean come first, because they are more specific."""
        if self.threshold is None:
            found = [reward_value(each, self.part) for each in first_per_rollout(group)]
        else:
            found = [is_success(each, self.part, self.threshold) for each in first_per_rollout(group)]
        values = [float(value) for value in found if value is not None]
        if not values:
            return "not judged"
        mean, deviation = float(np.mean(values)), float(np.std(values))
        if self.at_least is not None and mean < self.at_least - _EQUAL:
            return "mean too low"
        if self.at_most is not None and mean > self.at_most + _EQUAL:
            return "mean too high"
        if max(values) - min(values) <= _EQUAL:
            return "all equal"
        return "too alike" if deviation <= self.std_above else None


class InvalidRewardFilter(OperatorSection):
    """Drops completions without a reward, with a reward that is not finite, or whose reward timed out."""

    name: Literal["invalid_reward"] = "invalid_reward"
    outcomes: list[str] = ["timeout", "late"]
    """Outcomes of rewards to drop. Other outcomes: `gated`, `not_applicable`, and those of individual rewards such as
    `unparsable`. With the reward `code`, `timeout` is refused: there it means that the program was too slow."""

    def stage_conflicts(self, stage: StageConfig) -> Iterator[tuple[str, str]]:
        if "timeout" in self.outcomes and any(reward.timeout_is_verdict for reward in stage.rewards):
            text = "`timeout` of the reward `code` says that a program was too slow, and such failures would be dropped"
            yield "outcomes", f"{text}; give outcomes: [late]"

    def __call__(self, batch: Batch) -> None:
        for experience in rollouts_of(batch):
            if not set(self.outcomes).isdisjoint(experience.info.get("outcomes", {}).values()):
                batch.drop(experience, "unwanted outcome")
            elif experience.reward is None:
                batch.drop(experience, "no reward")
            elif not math.isfinite(experience.reward):
                batch.drop(experience, "not finite")


class TruncationOperator(OperatorSection):
    """Handles completions that were truncated at the length limit."""

    name: Literal["truncated"] = "truncated"
    then: Literal["mask", "drop", "reward"] = "mask"
    """`mask`: exclude its tokens from the loss, while its reward still counts in the group's baseline (overlong
    filtering of DAPO). `drop`: drop it. `reward`: give it the reward `reward`."""
    reward: float = 0.0
    """Reward of truncated completions. Only with `then: reward`."""

    @model_validator(mode="after")
    def _honoured(self) -> Self:
        self.reject_unused_keys(("reward",), self.then == "reward", "with then: reward")
        return self

    @property
    def drops_completions(self) -> bool:
        return self.then == "drop"

    def __call__(self, batch: Batch) -> None:
        if self.then == "reward":
            init_reward_part(batch)
        for experience in rollouts_of(batch):
            if experience.stop_reason is not StopReason.LENGTH:
                continue
            if self.then == "drop":
                batch.drop(experience, "cut off")
            elif self.then == "reward":
                set_reward(batch, experience, self.reward, "cut off reward")
            else:
                experience.info.setdefault("masked", experience.oldest_version)  # which the mask removes
                experience.action_mask = np.zeros_like(experience.action_mask)
                experience.logprobs = np.zeros_like(experience.logprobs)
                experience.versions = np.full_like(experience.versions, -1)
                batch.change(experience, "masked")


def _some_bound(section: FilterT, low: float | None, high: float | None) -> FilterT:
    if low is None and high is None:
        raise ValueError("give at_least, at_most or both")
    return _in_order(section, low, high)


def _in_order(section: FilterT, low: float | None, high: float | None) -> FilterT:
    if low is not None and high is not None and low > high:
        raise ValueError(f"at_least ({low:g}) is above at_most ({high:g}), so nothing would be left; change one")
    return section
