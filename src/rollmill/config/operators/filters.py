"""Operators that leave experiences out, or out of the loss."""

from __future__ import annotations

from typing import Any, Literal, Self, TypeVar

from pydantic import Field, model_validator

from rollmill.config.operators.base import (
    OperatorSection,
    RewardOperatorSection,
    SuccessOperatorSection,
    reject_weighting_keys,
)
from rollmill.config.rewards import RewardConfig, RewardSection

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


# `data_juicer`: operators of Data-Juicer on the text of completions.


class DataJuicerFilter(SuccessOperatorSection):
    """Runs operators of Data-Juicer (the package py-data-juicer) over the text of completions."""

    name: Literal["data_juicer"] = "data_juicer"
    process: list[dict[str, Any]] = Field(min_length=1)
    """Operators as in a Data-Juicer recipe: [{words_num_filter: {min_num: 10}}, ...]. Filters drop completions; those
    that need a whole data set are refused."""
    text: Literal["response", "prompt", "both"] = "response"
    """What the operators read."""
    mapped: Literal["refuse", "expert"] = "refuse"
    """What mappers, which change text, may do: nothing, or make expert experiences of the texts they changed, where
    the completion is a success (`part`, `threshold`). The completion itself keeps its tokens."""

    @model_validator(mode="after")
    def _named(self) -> Self:
        for entry in self.process:
            if len(entry) != 1:
                raise ValueError("each entry of process is one operator, as in {words_num_filter: {min_num: 10}}")
        if self.mapped == "expert" and self.text != "response":
            raise ValueError("mapped: expert needs text: response, which is what changes")
        self.reject_unused_keys(("part", "threshold"), self.mapped == "expert", "with mapped: expert")
        return self


# Operators against completions that say the same.


class DuplicatesOperator(OperatorSection):
    """Drops completions whose text was there before, but for white space. The first one stays."""

    name: Literal["duplicates"] = "duplicates"
    within: Literal["group", "task", "run"] = "group"
    """Where it was there before: in the group, in the run for the same task, or in the run for any task."""
    ignore_case: bool = False
    """Upper and lower case are the same."""
    memory: int = Field(10_000, ge=1)
    """How many texts are remembered; what was not seen for longest is forgotten. Not with `within: group`."""

    @model_validator(mode="after")
    def _honoured(self) -> Self:
        self.reject_unused_keys(("memory",), self.within != "group", "with within: task and within: run")
        return self


class NearDuplicatesOperator(OperatorSection):
    """Drops completions whose n-grams are nearly those of an earlier one (MinHash and LSH, extra `dedup`)."""

    name: Literal["near_duplicates"] = "near_duplicates"
    within: Literal["group", "task", "run"] = "group"
    """Which earlier ones count: of the group, of the run for the same task, or of the run for any task."""
    threshold: float = Field(0.8, gt=0, le=1)
    """Jaccard similarity of the n-grams, as estimated, from which a completion is dropped."""
    unit: Literal["words", "characters"] = "words"
    """What n-grams consist of. A character of Chinese, Japanese or Thai is a word, and so is a punctuation mark."""
    ngram: int = Field(3, ge=1)
    """Units of an n-gram; 3 words or 5 characters are usual."""
    permutations: int = Field(128, ge=16)
    """Hash functions: the estimate is off by about 1 / sqrt of this."""
    memory: int = Field(2_000, ge=1)
    """How many completions are remembered, the newest. Not with `within: group`."""

    @model_validator(mode="after")
    def _honoured(self) -> Self:
        self.reject_unused_keys(("memory",), self.within != "group", "with within: task and within: run")
        return self


# Operators that judge completions again, by further rewards.

RewardKeyPath = tuple[str | int, ...]


class VerifyOperator(RewardOperatorSection):
    """Judges completions again by other rewards, and acts where these disagree with what was earned.

    Completions that a closed gate kept from being judged are left alone.
    """

    name: Literal["verify"] = "verify"
    rewards: list[RewardConfig] = Field(min_length=1)
    """What judges again, as in the run file's `rewards`. Its sum is compared with the reward, or with `part`."""
    weight: float = 1.0
    """The weight that `part` has in the run file's `rewards`. Only with `part`."""
    tolerance: float = Field(0.01, ge=0)
    """A greater difference is a disagreement."""
    otherwise: Literal["replace", "drop", "penalty"] = "replace"
    """What a disagreement does: the new verdict replaces the old one, the completion is dropped, or it loses
    `penalty`."""
    penalty: float = Field(1.0, gt=0)
    """Only with `otherwise: penalty`."""
    share: float = Field(1.0, gt=0, le=1)
    """Judge only this share of the completions again: always the same ones, chosen by their ids."""
    at_least: float | None = None
    """Judge only completions again that earned at least this."""
    at_most: float | None = None
    """Judge only completions again that earned at most this."""

    @property
    def reward_lists(self) -> list[tuple[RewardKeyPath, list[RewardSection]]]:
        """Its rewards."""
        return [(("rewards",), list(self.rewards))]

    @model_validator(mode="after")
    def _honoured(self) -> Self:
        self.reject_unused_keys(("penalty",), self.otherwise == "penalty", "with otherwise: penalty")
        self.reject_unused_keys(("weight",), self.part is not None, "with part")
        if self.at_least is not None and self.at_most is not None and self.at_least > self.at_most:
            raise ValueError(f"at_least ({self.at_least:g}) is above at_most ({self.at_most:g}); change one")
        if all(reward.weight == 0 for reward in self.rewards):
            raise ValueError("every weight in rewards is 0, so there is nothing to compare with; give one another")
        return self


class CheckOperator(OperatorSection):
    """Lets completions pass that a reward finds good enough: the right form, the right language, no loops."""

    name: Literal["check"] = "check"
    reward: RewardConfig
    """One reward as in the run file's `rewards`, such as {name: format, tags: [think, answer]}."""
    at_least: float = 1.0
    """What it has to give. A completion that it does not apply to, or judges too late, passes."""
    otherwise: Literal["drop", "penalty"] = "drop"
    """The others are dropped, or lose `penalty`."""
    penalty: float = Field(1.0, gt=0)
    """Only with `otherwise: penalty`."""

    @property
    def reward_lists(self) -> list[tuple[RewardKeyPath, list[RewardSection]]]:
        """Its reward."""
        return [(("reward",), [self.reward])]

    @model_validator(mode="after")
    def _honoured(self) -> Self:
        self.reject_unused_keys(("penalty",), self.otherwise == "penalty", "with otherwise: penalty")
        reject_weighting_keys(self.reward, "reward", "the reward is compared with at_least as it is")
        return self
