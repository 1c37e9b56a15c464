"""RAFT: supervised fine-tuning on the policy's own accepted completions.

L = 1/sum_i T_i sum over completions with r_i > 0 of sum_t -log pi
"""

from __future__ import annotations

from typing import ClassVar, Literal

from rollmill.config.advantage import AdvantageConfig, BatchBaseline
from rollmill.config.algorithm import PolicyGradientOptions
from rollmill.config.loss import LossConfig, RAFTLoss


class RAFT(PolicyGradientOptions):
    """RAFT: imitates the completions with a positive reward."""

    source: ClassVar[str] = "arXiv:2304.06767"

    name: Literal["raft"] = "raft"
    advantage: AdvantageConfig = BatchBaseline(baseline="none")
    loss: LossConfig = RAFTLoss()
