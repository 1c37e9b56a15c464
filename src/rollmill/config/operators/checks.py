"""Operators that judge completions again, by further rewards."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from rollmill.config.operators.base import OperatorSection, RewardOperatorSection, reject_weighting_keys
from rollmill.config.rewards import RewardConfig, RewardSection

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
