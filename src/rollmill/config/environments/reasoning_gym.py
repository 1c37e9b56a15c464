"""Tasks of reasoning-gym with several attempts."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rollmill.config.environments.base import EnvironmentSection


class ReasoningGymSection(EnvironmentSection):
    """Several attempts at a task of `taskset.generator`, with feedback after a wrong answer.

    The reward is the generator's score of the last answer. With one attempt, it is equivalent to workflow `single_turn`
    with the reward `reasoning_gym`.
    """

    implementation = "rollmill.rollout.environments.reasoning_gym:ReasoningGymEnvironment"
    name: Literal["reasoning_gym"] = "reasoning_gym"
    attempts: int = Field(3, ge=1)
    """Maximum number of answers."""
    after: str | None = None
    """The answer is the text after the last occurrence of this marker; null: the whole reply."""
    solved: float = Field(1.0, gt=0, le=1)
    """Score at which the episode ends."""
    discount: float = Field(1.0, gt=0, le=1)
    """Factor of the reward per previous attempt."""
    feedback: str = "That is not right. Try again."
    """Message to the policy after a wrong answer."""
