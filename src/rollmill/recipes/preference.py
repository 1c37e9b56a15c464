"""DPO: preferences without a reward model, and IPO.

h = (lp_chosen - ref_chosen) - (lp_rejected - ref_rejected); lp: log-prob of a completion, a sum or mean over tokens
L = 1/P sum over pairs of -log sigmoid(beta h)   (loss: sigmoid)   or   (h - 1 / (2 beta))^2   (loss: ipo)
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from rollmill.config.algorithm import OfflineAlgorithmOptions


class DPO(OfflineAlgorithmOptions):
    """Direct preference optimisation on pairs of a chosen and a rejected completion."""

    uses_pairs: ClassVar[bool] = True
    source: ClassVar[str] = "arXiv:2305.18290"

    name: Literal["dpo"] = "dpo"
    loss: Literal["sigmoid", "ipo"] = "sigmoid"
    """DPO's own loss, or IPO's (arXiv:2310.12036)."""
    beta: float = Field(0.1, gt=0)
    """Strength of the pull to the reference. With `normalise` use greater values: 2 to 10."""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """Assumed probability that a preference is flipped. Only with loss `sigmoid`."""
    normalise: bool = False
    """Take means over tokens instead of sums (length-normalised DPO, arXiv:2411.15124)."""
    sft: float = Field(0.0, ge=0)
    """Weight of an additional SFT term on the chosen completion."""
