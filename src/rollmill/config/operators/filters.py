"""Operators that leave experiences out, or out of the loss."""

from __future__ import annotations

from typing import Literal, Self, TypeVar

from pydantic import Field, model_validator

from rollmill.config.operators.base import OperatorSection, RewardOperatorSection

FilterT = TypeVar("FilterT", bound=OperatorSection)


class RewardFilter(RewardOperatorSection):
    """Keeps completions whose reward lies within bounds; those that were not judged stay."""

    name: Literal["reward_filter"] = "reward_filter"
    at_least: float | None = None
    """Drop completions that earn less."""
    at_most: float | None = None
    """Drop completions that earn more."""

    @model_validator(mode="after")
    def _bounded(self) -> Self:
        return _some_bound(self, self.at_least, self.at_most)


class LengthFilter(OperatorSection):
    """Keeps completions whose length in tokens lies within bounds."""

    name: Literal["length_filter"] = "length_filter"
    at_least: int | None = Field(None, ge=0)
    """Drop shorter completions."""
    at_most: int | None = Field(None, ge=0)
    """Drop longer completions."""

    @model_validator(mode="after")
    def _bounded(self) -> Self:
        return _some_bound(self, self.at_least, self.at_most)


class GroupVarianceFilter(RewardOperatorSection):
    """Keeps groups whose completions earn different rewards, as far as wanted (dynamic sampling of DAPO).

    Others are dropped as a whole, and the run rolls out other tasks in their place.
    """

    name: Literal["group_variance"] = "group_variance"
    threshold: float | None = None
    """Compare successes instead of rewards: 1 for at least this, else 0."""
    std_above: float = Field(0.0, ge=0)
    """Drop groups whose standard deviation (of the population) is not above this; 0: those that are all equal."""
    at_least: float | None = None
    """Drop groups whose mean is lower: with `threshold` the share of successes."""
    at_most: float | None = None
    """Drop groups whose mean is higher."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        return _in_order(self, self.at_least, self.at_most)


class InvalidRewardFilter(OperatorSection):
    """Drops completions that have no reward, one that is not finite, or one that was judged too late."""

    name: Literal["invalid_reward"] = "invalid_reward"
    outcomes: list[str] = ["timeout", "late"]
    """Drop a completion where judging it by some reward ended like this. Other outcomes: `gated`, `not_applicable`,
    and words of the rewards' own such as `unparsable`. With the reward `code`, `timeout` is refused: there it means
    that the program was too slow."""


class TruncationOperator(OperatorSection):
    """What becomes of completions that were cut off at the length limit."""

    name: Literal["truncated"] = "truncated"
    then: Literal["mask", "drop", "reward"] = "mask"
    """`mask`: none of its tokens counts in the loss, while its reward still counts in the group's baseline (overlong
    filtering of DAPO). `drop`: it is gone. `reward`: it earns `reward`."""
    reward: float = 0.0
    """What it earns. Only with `then: reward`."""

    @model_validator(mode="after")
    def _honoured(self) -> Self:
        self.reject_unused_keys(("reward",), self.then == "reward", "with then: reward")
        return self


def _some_bound(section: FilterT, low: float | None, high: float | None) -> FilterT:
    if low is None and high is None:
        raise ValueError("give at_least, at_most or both")
    return _in_order(section, low, high)


def _in_order(section: FilterT, low: float | None, high: float | None) -> FilterT:
    if low is not None and high is not None and low > high:
        raise ValueError(f"at_least ({low:g}) is above at_most ({high:g}), so nothing would be left; change one")
    return section
