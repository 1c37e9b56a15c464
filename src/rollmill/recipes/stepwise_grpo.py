"""Step-wise GRPO for episodes of several steps: one advantage per episode, used on each of its steps.

A = (r - mean) / (std + eps) over the episodes of the group, each counted once
L = 1/N sum_i 1/T_i sum_t -min(rho A_i, clip(rho) A_i), N steps
"""

from __future__ import annotations

from typing import ClassVar, Literal

from rollmill.config.advantage import AdvantageConfig, StepwiseAdvantage
from rollmill.config.algorithm import Aggregation, PolicyGradientOptions


class StepwiseGRPO(PolicyGradientOptions):
    """Step-wise GRPO: an episode's advantage on each of its steps."""

    source: ClassVar[str] = "arXiv:2505.17826"

    name: Literal["stepwise_grpo"] = "stepwise_grpo"
    advantage: AdvantageConfig = StepwiseAdvantage()
    aggregation: Aggregation = "sequence-mean"
