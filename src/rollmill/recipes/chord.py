"""CHORD: MIX whose share of imitation follows a schedule, with less weight on tokens the policy is sure of.

L = (1 - mu_s) L_grpo(usual) + mu_s L_sft(expert) at step s
mu_s: 0 to `peak` in a line over `warmup` steps, then to `valley` along half a cosine over `decay` steps
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
    """The greatest share."""
    valley: float = Field(0.05, ge=0, le=1)
    """The share that stays."""
    token_weights: bool = True
    """Weigh expert tokens by p (1 - p)."""
