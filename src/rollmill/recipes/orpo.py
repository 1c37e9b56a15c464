"""ORPO: imitation of the chosen completion plus a penalty on the odds of the rejected one, without a reference.

p = exp(mean over tokens of log pi) of a completion;   odds = p / (1 - p)
L = 1/P sum over pairs of -log p_chosen - weight log sigmoid(log(odds_chosen / odds_rejected))
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from rollmill.config.algorithm import OfflineAlgorithmOptions


class ORPO(OfflineAlgorithmOptions):
    """Odds-ratio preference optimisation on pairs of a chosen and a rejected completion."""

    uses_pairs: ClassVar[bool] = True
    source: ClassVar[str] = "arXiv:2403.07691"

    name: Literal["orpo"] = "orpo"
    weight: float = Field(0.1, ge=0)
    """Weight of the odds-ratio term (lambda of the paper, beta in TRL)."""
