"""MIX (Trinity-RFT): reinforcement on rollouts and imitation of experts in one update.

L = (1 - mu) L_grpo(rollouts) + mu L_sft(expert), each with its own denominator

The publication has L_grpo + mu L_sft, the published code (1 - mu) and mu; this is the convex form. L_grpo is
the whole GRPO loss (surrogate, KL penalty, entropy bonus); L_sft is a token mean.
"""

from __future__ import annotations

import math
from typing import ClassVar, Literal

from pydantic import Field

from rollmill.recipes.grpo import GRPO


class MixedOptions(GRPO):
    """Base of algorithms that learn from rollouts and demonstrations in one update."""

    uses_experts: ClassVar[bool] = True

    expert_ratio: float = Field(0.25, gt=0, lt=1)
    """Expert share: ceil(expert_ratio x rollout.batch x rollout.group_size) demonstrations join each step."""

    def demonstrations_per_step(self, rollouts: int) -> int:
        """See AlgorithmOptions."""
        return math.ceil(self.expert_ratio * rollouts)


class MIX(MixedOptions):
    """Trinity-RFT's MIX: (1 - mu) L_grpo(rollouts) + mu L_sft(expert), each with its own denominator."""

    source: ClassVar[str] = "arXiv:2505.17826"

    name: Literal["mix"] = "mix"  # type: ignore[assignment]
    mu: float = Field(0.1, ge=0, le=1)
    """Weight of the SFT term."""
