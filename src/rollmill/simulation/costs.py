"""Seconds that the parts of a simulated run take: measured ones, or estimates from data sheets."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SimulationCosts:
    """Costs in seconds. Groups and training times are drawn from measurements."""

    groups: Sequence[Sequence[int]]  #: tokens of each completion, by group
    train_s: Sequence[float]  #: a training step, without publishing
    pass_s: float  #: constant cost of a decode pass
    row_s: float  #: cost of a decode pass per completion in it
    group_s: float = 0.0  #: to start and deliver a group; its explorer does not decode meanwhile
    judge_s: float = 0.0  #: from a group's last token to its rewards
    publish_s: float = 0.0  #: for the trainer to send new weights
    receive_s: float = 0.0  #: for an explorer to receive them
    recompute_s: float = 0.0  #: per running completion then, to recompute its keys and values

    def lengths(self, seed: int, count: int) -> list[int]:
        """Tokens of each of `count` completions of the group with this seed."""
        group = random.Random(seed).choice(self.groups)
        return [group[index % len(group)] for index in range(count)]
