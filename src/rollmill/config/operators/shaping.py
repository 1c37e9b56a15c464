"""Operators that shape rewards (added as the part `pipeline/NAME`), set replay priorities and report success rates."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from rollmill.config.operators.base import OperatorSection, RewardOperatorSection, SuccessOperatorSection


class LengthShaping(SuccessOperatorSection):
    """Length reward within a group: shorter is better, and failures never gain (Kimi k1.5).

    From .5 for the shortest to -.5 for the longest completion, at most 0 for failures.
    """

    adds_to_rewards: ClassVar[bool] = True

    compares = True
    implementation = "rollmill.pipelines.shaping:length_reward"
    name: Literal["length_reward"] = "length_reward"
    weight: float = 1.0
    """Factor of the added reward."""
    warmup_steps: int = Field(0, ge=0)
    """Number of initial training steps without effect."""


class OverlongPenalty(OperatorSection):
    """Soft overlong penalty: 0, then falling to -1 over the last `buffer` tokens before `longest` (DAPO)."""

    adds_to_rewards: ClassVar[bool] = True

    implementation = "rollmill.pipelines.shaping:overlong_penalty"
    name: Literal["overlong_penalty"] = "overlong_penalty"
    longest: int | None = Field(None, ge=1)
    """Maximum length in tokens (L_max). Default: rollout.max_new_tokens."""
    buffer: int | None = Field(None, ge=1)
    """Number of tokens over which the penalty grows (L_cache). Default: a fifth of `longest`, as published."""
    weight: float = Field(1.0, ge=0)
    """Factor of the penalty."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.longest is not None and self.buffer is not None and self.buffer > self.longest:
            raise ValueError(f"buffer ({self.buffer}) is above longest ({self.longest}); lower it")
        return self


class RepetitionPenalty(OperatorSection):
    """Penalty down to -1 for the fraction of repeated n-grams, or the fraction of the text in a loop at its end."""

    adds_to_rewards: ClassVar[bool] = True

    implementation = "rollmill.pipelines.shaping:repetition_penalty"
    name: Literal["repetition_penalty"] = "repetition_penalty"
    ngram: int = Field(8, ge=1)
    """Length of an n-gram in tokens."""
    free: float = Field(0.0, ge=0, lt=1)
    """Fraction without a penalty; the rest is scaled to reach -1."""
    loop_times: int = Field(4, ge=2)
    """Minimum number of consecutive repeats of a loop at the end."""
    loop_tokens: int = Field(32, ge=2)
    """Minimum number of tokens of all repeats together."""
    weight: float = Field(1.0, ge=0)
    """Factor of the penalty."""


class DiversityBonus(SuccessOperatorSection):
    """Bonus from 0 to 1 for successes that differ from the other completions of their group."""

    adds_to_rewards: ClassVar[bool] = True

    compares = True
    implementation = "rollmill.pipelines.shaping:diversity"
    name: Literal["diversity"] = "diversity"
    by: Literal["ngrams", "answer"] = "ngrams"
    """`ngrams`: mean Jaccard distance of n-grams to the other completions. `answer`: fraction of the other completions
    with a different answer."""
    ngram: int = Field(4, ge=1)
    """Length of an n-gram in tokens. Only with `by: ngrams`."""
    after: str | None = None
    """The answer is what follows the last occurrence of this text. Default: all of the text without reasoning. Only
    with `by: answer`."""
    weight: float = Field(0.1, ge=0)
    """Factor of the bonus."""

    @model_validator(mode="after")
    def _honoured(self) -> Self:
        self.reject_unused_keys(("ngram",), self.by == "ngrams", "with by: ngrams")
        self.reject_unused_keys(("after",), self.by == "answer", "with by: answer")
        return self


class RewardScaling(OperatorSection):
    """reward * factor + offset, then clipped."""

    adds_to_rewards: ClassVar[bool] = True
    rewrites_rewards: ClassVar[bool] = True

    implementation = "rollmill.pipelines.shaping:scale"
    name: Literal["scale"] = "scale"
    factor: float = 1.0
    """Multiplies the reward."""
    offset: float = 0.0
    """Added after multiplying."""
    clip: tuple[float, float] | None = None
    """Lower and upper bound of the result."""

    @model_validator(mode="after")
    def _changes(self) -> Self:
        if self.clip is not None and self.clip[0] > self.clip[1]:
            raise ValueError(f"clip: the lower bound {self.clip[0]:g} is above the upper {self.clip[1]:g}")
        if (self.factor, self.offset, self.clip) == (1.0, 0.0, None):
            raise ValueError("changes nothing; give factor, offset or clip")
        return self


# Replay priority and success rate


class ReplayPriority(RewardOperatorSection):
    """Sets the replay priority of a group (`buffer.replay`, order `priority`)."""

    implementation = "rollmill.pipelines.shaping:priority"
    name: Literal["priority"] = "priority"
    by: Literal["variance", "balance", "reward", "failure", "length", "recency"] = "variance"
    """`variance` of the rewards, or p (1 - p) for rewards of 0 and 1. `balance`: 1 - 2 |mean - 0.5|. `reward`: their
    mean. `failure`: 1 - mean. `length`: mean length / max_new_tokens. `recency`: the training step."""
    threshold: float | None = None
    """Use successes instead of rewards: 1 for at least this, else 0."""
    floor: float = Field(0.01, ge=0)
    """Minimum priority. Groups with priority 0 are never replayed."""

    @model_validator(mode="after")
    def _honoured(self) -> Self:
        rewarded = self.by not in ("length", "recency")
        self.reject_unused_keys(("part", "threshold"), rewarded, "by those that look at rewards, not by: " + self.by)
        return self


class SuccessRateOperator(SuccessOperatorSection):
    """Reports which completions are successes to samplers that choose tasks by success rate. Put it before filters.

    Without it, samplers use the rewards of all completions, clipped to 0 and 1.
    """

    implementation = "rollmill.pipelines.shaping:success_rate"
    name: Literal["success_rate"] = "success_rate"
