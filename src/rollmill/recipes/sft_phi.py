"""SFT with CHORD's phi function: low weight for tokens with a probability near 0 or 1.

L = 1/sum_i T_i sum_i sum_t -sg(p (1 - p)) min(log p, log cutoff),   p = pi of the demonstrated token
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from rollmill.recipes.sft import SFT


class SFTPhi(SFT):
    """Supervised fine-tuning with each token weighted by p (1 - p)."""

    source: ClassVar[str] = "arXiv:2508.11408"

    name: Literal["sft_phi"] = "sft_phi"  # type: ignore[assignment]
    cutoff: float = Field(1.0, gt=0, le=1)
    """Tokens with a greater probability have no gradient. 1: all have one."""
