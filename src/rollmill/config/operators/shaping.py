"""Operators that add to rewards. What they add is in the reward's parts, as `pipeline/NAME`."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from rollmill.config.operators.base import OperatorSection, RewardOperatorSection, SuccessOperatorSection


class LengthShaping(SuccessOperatorSection):
    """Shorter is better within a group, and a failure gains nothing (Kimi k1.5).

    From .5 for the shortest to -.5 for the longest, at most 0 for failures.
    """

    adds_to_rewards: ClassVar[bool] = True

    name: Literal["length_reward"] = "length_reward"
    weight: float = 1.0
    """Factor of what is added."""
    warmup_steps: int = Field(0, ge=0)
    """Add nothing before this many training steps were made."""


class OverlongPenalty(OperatorSection):
    """0, then falling to -1 over the last `buffer` tokens before `longest` (DAPO)."""

    adds_to_rewards: ClassVar[bool] = True

    name: Literal["overlong_penalty"] = "overlong_penalty"
    longest: int | None = Field(None, ge=1)
    """L_max, in tokens. Default: rollout.max_new_tokens."""
    buffer: int | None = Field(None, ge=1)
    """L_c, over how many tokens the penalty grows. Default: a fifth of `longest`, as published."""
    weight: float = Field(1.0, ge=0)
    """Factor of the penalty."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.longest is not None and self.buffer is not None and self.buffer > self.longest:
            raise ValueError(f"buffer ({self.buffer}) is above longest ({self.longest}); lower it")
        return self


class RepetitionPenalty(OperatorSection):
    """Down to -1: the share of n-grams that stood before, or of the text that is a loop at its end."""

    adds_to_rewards: ClassVar[bool] = True

    name: Literal["repetition_penalty"] = "repetition_penalty"
    ngram: int = Field(8, ge=1)
    """Length of an n-gram in tokens."""
    free: float = Field(0.0, ge=0, lt=1)
    """Share that costs nothing; what is above it is scaled to reach -1."""
    loop_times: int = Field(4, ge=2)
    """How often a stretch has to stand at the end, one right after the other, to be a loop."""
    loop_tokens: int = Field(32, ge=2)
    """Fewest tokens of a loop, all its rounds together."""
    weight: float = Field(1.0, ge=0)
    """Factor of the penalty."""


class DiversityBonus(SuccessOperatorSection):
    """Successes earn more the less they are like the other completions of their group: from 0 to 1."""

    adds_to_rewards: ClassVar[bool] = True

    name: Literal["diversity"] = "diversity"
    by: Literal["ngrams", "answer"] = "ngrams"
    """`ngrams`: mean Jaccard distance of the n-grams to those of each other completion. `answer`: the share of the
    others that say something else."""
    ngram: int = Field(4, ge=1)
    """Length of an n-gram in tokens. Only with `by: ngrams`."""
    after: str | None = None
    """The answer is what follows the last occurrence of this text; default: the whole text. Only with `by: answer`."""
    weight: float = Field(0.1, ge=0)
    """Factor of what is added."""

    @model_validator(mode="after")
    def _honoured(self) -> Self:
        self.reject_unused_keys(("ngram",), self.by == "ngrams", "with by: ngrams")
        self.reject_unused_keys(("after",), self.by == "answer", "with by: answer")
        return self


class RewardScaling(OperatorSection):
    """reward * factor + offset, then within bounds."""

    adds_to_rewards: ClassVar[bool] = True
    rewrites_rewards: ClassVar[bool] = True

    name: Literal["scale"] = "scale"
    factor: float = 1.0
    """Multiplies the reward."""
    offset: float = 0.0
    """Added after the factor."""
    clip: tuple[float, float] | None = None
    """Lower and upper bound of the result."""

    @model_validator(mode="after")
    def _changes(self) -> Self:
        if self.clip is not None and self.clip[0] > self.clip[1]:
            raise ValueError(f"clip: the lower bound {self.clip[0]:g} is above the upper {self.clip[1]:g}")
        if (self.factor, self.offset, self.clip) == (1.0, 0.0, None):
            raise ValueError("changes nothing; give factor, offset or clip")
        return self


# Operators that tell other components about a group: how soon to learn from it again, how hard its task is.


class ReplayPriority(RewardOperatorSection):
    """Sets the priority with which a group is learned from again (`buffer.replay`, order `priority`)."""

    name: Literal["priority"] = "priority"
    by: Literal["variance", "balance", "reward", "failure", "length", "recency"] = "variance"
    """`variance` of the rewards, p (1 - p) where they are 0 and 1. `balance`: 1 - 2 |mean - 0.5|. `reward`: their mean.
    `failure`: 1 - mean. `length`: mean length / max_new_tokens. `recency`: the training step."""
    threshold: float | None = None
    """Look at successes instead of rewards: 1 for at least this, else 0."""
    floor: float = Field(0.01, ge=0)
    """The least priority. At 0 such groups are never learned from again."""

    @model_validator(mode="after")
    def _honoured(self) -> Self:
        rewarded = self.by not in ("length", "recency")
        self.reject_unused_keys(("part", "threshold"), rewarded, "by those that look at rewards, not by: " + self.by)
        return self


class SuccessRateOperator(SuccessOperatorSection):
    """Says which completions count as a success, for samplers that choose tasks by it. Put it before filters.

    Without it samplers see the rewards of all completions, within 0 and 1.
    """

    name: Literal["success_rate"] = "success_rate"
