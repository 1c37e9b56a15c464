"""`rewards`: models that judge."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from rollmill.config.rewards.base import RewardSection


class ModelReward(RewardSection):
    """The score of a reward model: a sequence classifier with one output."""

    name: Literal["model"]
    path: Path
    """A Hugging Face folder of a sequence classifier, such as RUN/checkpoints/step-N/reward_model."""
    batch_tokens: int = Field(8192, ge=1)
    """Tokens per forward pass, padding included; one completion may have more."""
