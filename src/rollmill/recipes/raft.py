"""RAFT: supervised fine-tuning on the policy's own best completions (algorithm 1).

L = 1/sum_i T_i sum_i sum_t -log pi, i over the accepted completions: the best of each group

`advantage: {threshold: 0}` accepts none of a group whose best reward is 0. `{accept: all, threshold: 0}` accepts every
completion with a positive reward, as arXiv:2504.11343 does for rewards of 0 and 1.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from rollmill.config.advantage import AdvantageConfig, BestOfGroup
from rollmill.config.algorithm import PolicyGradientOptions
from rollmill.config.loss import LossConfig, RAFTLoss


class RAFT(PolicyGradientOptions):
    """RAFT: imitates the best completion of each group."""

    source: ClassVar[str] = "arXiv:2304.06767"

    name: Literal["raft"] = "raft"
    advantage: AdvantageConfig = BestOfGroup()
    loss: LossConfig = RAFTLoss()
