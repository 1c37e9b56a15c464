"""Kimi k1.5's online mirror descent.

L = 1/N sum_i (r_i - mean - tau sum_t log rho_t)^2

rho is relative to the policy at the start of the step, where the optimizer is reset. Set `trainer.updates_per_batch`
above 1.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from rollmill.config.advantage import AdvantageConfig, MeanBaseline
from rollmill.config.algorithm import Aggregation, PolicyGradientOptions
from rollmill.config.loss import KimiMirrorLoss, LossConfig


class Kimi(PolicyGradientOptions):
    """Kimi k1.5: squared distance between advantage and log-ratio, the optimizer reset every step."""

    source: ClassVar[str] = "arXiv:2501.12599"

    name: Literal["kimi"] = "kimi"
    advantage: AdvantageConfig = MeanBaseline()
    loss: LossConfig = KimiMirrorLoss()
    aggregation: Aggregation = "sequence-mean"
    reset_optimizer: bool = True
