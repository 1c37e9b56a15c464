"""GiGPO: group-in-group advantages for agents that take several steps.

A = A^E + weight A^S: the episode relative to its group, and the step relative to steps taken in the same state
L = 1/N sum_i 1/T_i sum_t -min(rho A_i, clip(rho) A_i), N steps
"""

from __future__ import annotations

from typing import ClassVar, Literal

from rollmill.config.advantage import AdvantageConfig, GroupInGroupAdvantage
from rollmill.config.algorithm import Aggregation, PolicyGradientOptions


class GiGPO(PolicyGradientOptions):
    """GiGPO: the episode's advantage plus the step's relative to steps taken in the same state."""

    source: ClassVar[str] = "arXiv:2505.10978"

    name: Literal["gigpo"] = "gigpo"
    advantage: AdvantageConfig = GroupInGroupAdvantage()
    aggregation: Aggregation = "sequence-mean"
