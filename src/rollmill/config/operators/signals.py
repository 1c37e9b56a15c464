"""Operators that tell other components about a group: how soon to learn from it again, how hard its task is."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from rollmill.config.operators.base import RewardOperatorSection, SuccessOperatorSection


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
