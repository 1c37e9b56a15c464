"""Supervised fine-tuning: -log p of the expert's tokens.

L = 1/sum_i T_i sum_i sum_t -log pi over the demonstrations of the step
"""

from __future__ import annotations

from typing import ClassVar, Literal

from rollmill.config.algorithm import Aggregation, OfflineAlgorithmOptions


class SFT(OfflineAlgorithmOptions):
    """Supervised fine-tuning on the tasks' worked solutions."""

    uses_experts: ClassVar[bool] = True

    name: Literal["sft"] = "sft"
    aggregation: Aggregation = "token-mean"
    """Aggregation of per-token terms."""
