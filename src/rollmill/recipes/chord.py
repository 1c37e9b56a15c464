"""CHORD: MIX with a scheduled share of imitation, and lower weight for tokens with a probability near 0 or 1.

L = (1 - mu_s) L_grpo(rollouts) + mu_s L_sft(expert) at step s
mu_s: linearly from 0 to `peak` over `warmup` steps, then along half a cosine to `valley` over `decay` steps
L_sft = 1/sum_i T_i sum_i sum_t -sg(p (1 - p)) log p, or plain -log p
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from rollmill.recipes.mix import MixedOptions


class CHORD(MixedOptions):
    """CHORD: GRPO and imitation, the share of imitation rising and falling over the steps."""

    source: ClassVar[str] = "arXiv:2508.11408"

    name: Literal["chord"] = "chord"  # type: ignore[assignment]
    warmup: int = Field(0, ge=0)
    """Steps over which the share of imitation rises to `peak`."""
    decay: int = Field(200, ge=1)
    """Steps over which it falls from `peak` to `valley`."""
    peak: float = Field(0.9, ge=0, le=1)
    """The maximum share."""
    valley: float = Field(0.05, ge=0, le=1)
    """The final share."""
    token_weights: bool = True
    """Weight expert tokens by p (1 - p)."""
