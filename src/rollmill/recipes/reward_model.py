"""A reward model: one score per completion, from preferences (Bradley-Terry).

r = w . h_last: a linear head without bias on the hidden state of the completion's last token
L = 1/P sum over pairs of -log sigmoid(r_chosen - r_rejected - margin) + centre_coefficient (r_chosen + r_rejected)^2
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from rollmill.config.algorithm import OfflineAlgorithmOptions


class RewardModel(OfflineAlgorithmOptions):
    """Train a copy of the policy's network to score the chosen completion of a pair above the rejected one.

    The policy is not changed. Each checkpoint holds the reward model in the folder `reward_model`.
    """

    uses_pairs: ClassVar[bool] = True
    trains_policy: ClassVar[bool] = False
    source: ClassVar[str] = "arXiv:2203.02155"

    name: Literal["reward_model"] = "reward_model"
    margin: float = Field(0.0, ge=0)
    """Margin by which the chosen score should exceed the rejected one (arXiv:2307.09288)."""
    centre_coefficient: float = Field(0.0, ge=0)
    """Weight of the squared sum of a pair's scores, which keeps scores around 0 (arXiv:2312.09244)."""
