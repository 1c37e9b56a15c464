"""Operators that drop experiences, mask them, or score them again."""

from __future__ import annotations

from typing import Any, Literal, Self, TypeVar

from pydantic import Field, model_validator

from rollmill.config.operators.base import (
    ALL_SOURCES,
    OperatorSection,
    RewardOperatorSection,
    SuccessOperatorSection,
    reject_weighting_keys,
)
from rollmill.config.rewards import Reward, RewardConfig
from rollmill.types import ExperienceSource

FilterT = TypeVar("FilterT", bound=OperatorSection)


class RewardFilter(RewardOperatorSection):
    """Keeps completions whose reward lies within bounds; completions without a reward are kept."""

    drops = True
    implementation = "rollmill.pipelines.filters:reward_filter"
    name: Literal["reward_filter"] = "reward_filter"
    at_least: float | None = None
    """Drop completions with a lower reward."""
    at_most: float | None = None
    """Drop completions with a higher reward."""

    @model_validator(mode="after")
    def _bounded(self) -> Self:
        return _some_bound(self, self.at_least, self.at_most)


class LengthFilter(OperatorSection):
    """Keeps completions, demonstrations and pairs whose length in tokens lies within bounds."""

    drops = True
    handles = ALL_SOURCES
    implementation = "rollmill.pipelines.filters:length_filter"
    name: Literal["length_filter"] = "length_filter"
    at_least: int | None = Field(None, ge=0)
    """Drop shorter completions."""
    at_most: int | None = Field(None, ge=0)
    """Drop longer completions."""

    @model_validator(mode="after")
    def _bounded(self) -> Self:
        return _some_bound(self, self.at_least, self.at_most)


class GroupVarianceFilter(RewardOperatorSection):
    """Keeps groups whose completions earn sufficiently different rewards (dynamic sampling of DAPO).

    Other groups are dropped as a whole, and the run rolls out other tasks in their place.
    """

    drops = True
    compares = True
    implementation = "rollmill.pipelines.filters:group_variance"
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


class InvalidRewardFilter(OperatorSection):
    """Drops completions without a reward, with a reward that is not finite, or whose reward timed out."""

    implementation = "rollmill.pipelines.filters:invalid_reward"
    name: Literal["invalid_reward"] = "invalid_reward"
    outcomes: list[str] = ["timeout", "late"]
    """Outcomes of rewards to drop. Other outcomes: `gated`, `not_applicable`, and those of individual rewards such as
    `unparsable`. With the reward `code`, `timeout` is refused: there it means that the program was too slow."""


class TruncationOperator(OperatorSection):
    """Handles completions that were truncated at the length limit."""

    implementation = "rollmill.pipelines.filters:truncated"
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


def _some_bound(section: FilterT, low: float | None, high: float | None) -> FilterT:
    if low is None and high is None:
        raise ValueError("give at_least, at_most or both")
    return _in_order(section, low, high)


def _in_order(section: FilterT, low: float | None, high: float | None) -> FilterT:
    if low is not None and high is not None and low > high:
        raise ValueError(f"at_least ({low:g}) is above at_most ({high:g}), so nothing would be left; change one")
    return section


# Data-Juicer


class DataJuicerFilter(SuccessOperatorSection):
    """Runs operators of Data-Juicer (the package py-data-juicer) over completions, demonstrations and pairs."""

    handles = ALL_SOURCES
    implementation = "rollmill.pipelines.data_juicer:DataJuicerOperators"
    name: Literal["data_juicer"] = "data_juicer"
    process: list[dict[str, Any]] = Field(min_length=1)
    """Operators as in a Data-Juicer recipe: [{words_num_filter: {min_num: 10}}, ...]. Filters drop completions;
    operators that need a whole data set are refused."""
    text: Literal["response", "prompt", "both"] = "response"
    """Text that the operators read."""
    mapped: Literal["refuse", "expert"] = "refuse"
    """Handling of mappers, which change text: refuse them, or create demonstrations of the changed texts of
    successes (`part`, `threshold`). The completion itself keeps its tokens."""

    @model_validator(mode="after")
    def _named(self) -> Self:
        for entry in self.process:
            if len(entry) != 1:
                raise ValueError("each entry of process is one operator, as in {words_num_filter: {min_num: 10}}")
        if self.mapped == "expert" and self.text != "response":
            raise ValueError("mapped: expert needs text: response, which is what changes")
        self.reject_unused_keys(("part", "threshold"), self.mapped == "expert", "with mapped: expert")
        return self


# Duplicates


class DuplicatesOperator(OperatorSection):
    """Drops completions with the text of an earlier one, ignoring white space. The first one is kept."""

    drops = True
    implementation = "rollmill.pipelines.deduplication:DuplicateFilter"
    name: Literal["duplicates"] = "duplicates"
    within: Literal["group", "task", "run"] = "group"
    """Scope of earlier completions: the group, the run for the same task, or the run for any task."""
    ignore_case: bool = False
    """Ignore upper and lower case."""
    memory: int = Field(10_000, ge=1)
    """Number of texts to remember; the least recently seen are dropped first. Not with `within: group`."""

    @model_validator(mode="after")
    def _honoured(self) -> Self:
        self.reject_unused_keys(("memory",), self.within != "group", "with within: task and within: run")
        return self

    @property
    def compares_completions(self) -> bool:
        return self.within == "group"


class NearDuplicatesOperator(OperatorSection):
    """Drops completions whose n-grams are nearly those of an earlier one (MinHash and LSH, extra `dedup`)."""

    drops = True
    implementation = "rollmill.pipelines.deduplication:NearDuplicateFilter"
    needs_extra = ("dedup", "datasketch")
    name: Literal["near_duplicates"] = "near_duplicates"
    within: Literal["group", "task", "run"] = "group"
    """Scope of earlier completions: the group, the run for the same task, or the run for any task."""
    threshold: float = Field(0.8, gt=0, le=1)
    """Minimum estimated Jaccard similarity of the n-grams of duplicates."""
    unit: Literal["words", "characters"] = "words"
    """Unit of the n-grams. A character of Chinese, Japanese or Thai is a word, and so is a punctuation mark."""
    ngram: int = Field(3, ge=1)
    """Units per n-gram; 3 words or 5 characters are common."""
    permutations: int = Field(128, ge=16)
    """Number of hash functions; the estimate's error is about 1 / sqrt of this."""
    memory: int = Field(2_000, ge=1)
    """Number of most recent completions to remember. Not with `within: group`."""

    @model_validator(mode="after")
    def _honoured(self) -> Self:
        self.reject_unused_keys(("memory",), self.within != "group", "with within: task and within: run")
        return self

    @property
    def compares_completions(self) -> bool:
        return self.within == "group"


RewardKeyPath = tuple[str | int, ...]


class VerifyOperator(RewardOperatorSection):
    """Scores completions again with other rewards, and handles disagreements with the original reward.

    Completions that did not pass a gate are left unchanged.
    """

    implementation = "rollmill.pipelines.verification:RewardVerifier"
    name: Literal["verify"] = "verify"
    rewards: list[RewardConfig] = Field(min_length=1)
    """Verifying rewards, as in the run file's `rewards`. Their sum is compared with the reward, or with `part`."""
    weight: float = 1.0
    """Weight of `part` in the run file's `rewards`. Only with `part`."""
    tolerance: float = Field(0.01, ge=0)
    """Larger differences are disagreements."""
    otherwise: Literal["replace", "drop", "penalty"] = "replace"
    """On disagreement, replace the reward by the new one, drop the completion, or subtract `penalty`."""
    penalty: float = Field(1.0, gt=0)
    """Penalty to subtract. Only with `otherwise: penalty`."""
    share: float = Field(1.0, gt=0, le=1)
    """Verify only this fraction of the completions, chosen deterministically by their ids."""
    at_least: float | None = None
    """Verify only completions with at least this reward."""
    at_most: float | None = None
    """Verify only completions with at most this reward."""

    @property
    def reward_lists(self) -> list[tuple[RewardKeyPath, list[Reward]]]:
        """The operator's rewards."""
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

    @property
    def drops_completions(self) -> bool:
        return self.otherwise == "drop"


class CheckOperator(OperatorSection):
    """Keeps completions and demonstrations that score high enough on one reward, such as format or language."""

    handles = frozenset({ExperienceSource.ROLLOUT, ExperienceSource.EXPERT})
    implementation = "rollmill.pipelines.verification:RewardChecker"
    name: Literal["check"] = "check"
    reward: RewardConfig
    """A reward as in the run file's `rewards`, such as {name: format, tags: [think, answer]}."""
    at_least: float = 1.0
    """Minimum value of the reward. Completions to which it does not apply, or that time out, are kept."""
    otherwise: Literal["drop", "penalty"] = "drop"
    """Drop the other completions, or subtract `penalty` from their reward. Demonstrations have no reward: they are
    dropped, and not given to the operator otherwise."""
    penalty: float = Field(1.0, gt=0)
    """Penalty to subtract. Only with `otherwise: penalty`."""

    @property
    def taken(self) -> frozenset[ExperienceSource]:
        return super().taken if self.otherwise == "drop" else frozenset({ExperienceSource.ROLLOUT})

    @property
    def reward_lists(self) -> list[tuple[RewardKeyPath, list[Reward]]]:
        """The operator's reward."""
        return [(("reward",), [self.reward])]

    @model_validator(mode="after")
    def _honoured(self) -> Self:
        self.reject_unused_keys(("penalty",), self.otherwise == "penalty", "with otherwise: penalty")
        self.reject_unused_keys(("sources",), self.otherwise == "drop", "with otherwise: drop")
        reject_weighting_keys(self.reward, "reward", "the reward is compared with at_least as it is")
        return self

    @property
    def drops_completions(self) -> bool:
        return self.otherwise == "drop"
