"""Tasks of reasoning-gym with more than one attempt."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rollmill.config.environments.base import EnvironmentSection


class ReasoningGymSection(EnvironmentSection):
    """Several attempts at a task of `taskset.generator`: a wrong answer gets feedback and another try.

    The reward is the generator's score of the last answer. With one attempt, workflow `single_turn` and the reward
    `reasoning_gym` do the same.
    """

    name: Literal["reasoning_gym"] = "reasoning_gym"
    attempts: int = Field(3, ge=1)
    """Answers that may be given."""
    after: str | None = None
    """The answer is what follows the last such marker; null: the whole reply."""
    solved: float = Field(1.0, gt=0, le=1)
    """A score that ends the episode."""
    discount: float = Field(1.0, gt=0, le=1)
    """The reward is multiplied by this for every attempt before."""
    feedback: str = "That is not right. Try again."
    """What the policy is told after a wrong answer."""
