"""Data-parallel ranks: every rank holds the model, or its shard of it, sees the whole batch, and works on its share of
the rows.

Denominators are those of the whole batch on every rank, so gradients only add up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rollmill.trainer.sharding import norm_over_ranks

Result = TypeVar("Result")


@dataclass(frozen=True)
class Ranks:
    """Which of how many ranks this process is. With more than one, torch.distributed has to be initialised."""

    rank: int = 0
    size: int = 1
    sharded: bool = False  #: models are cut into shards (see sharding.py), rather than whole on every rank

    @staticmethod
    def of_process() -> Ranks:
        """Those of torch.distributed, or the only one."""
        if not dist.is_initialized():
            return Ranks()
        return Ranks(dist.get_rank(), dist.get_world_size())

    def add(self, tensor: Tensor) -> Tensor:
        """The sum of `tensor` over the ranks, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def add_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Sum gradients over the ranks, unless that was done in the backward pass; what has none on any rank keeps
        none."""
        if self.size == 1 or self.sharded:
            return
        trainable = [p for p in parameters if p.requires_grad]
        device = trainable[0].device
        present = self.add(torch.tensor([float(p.grad is not None) for p in trainable], device=device))
        for parameter, count in zip(trainable, present.tolist(), strict=True):
            if count:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(parameter.grad)

    def norm(self, norm: float) -> float:
        """Euclidean norm of a gradient, from that of what this rank holds of it."""
        return norm_over_ranks(norm) if self.sharded else norm

    def merged(self, numbers: dict[str, float]) -> dict[str, float]:
        """Sums by name over the ranks; a name may be missing on some."""
        if self.size == 1:
            return numbers
        gathered: list[dict[str, float]] = [{}] * self.size
        dist.all_gather_object(gathered, numbers)
        total: dict[str, float] = {}
        for each in gathered:
            for name, value in each.items():
                total[name] = total.get(name, 0.0) + value
        return total

    def first(self, value: Result | None) -> Result | None:
        """The first of the ranks' values that is not None."""
        if self.size == 1:
            return value
        gathered: list[Result | None] = [None] * self.size
        dist.all_gather_object(gathered, value)
        return next((each for each in gathered if each is not None), None)

    def greatest(self, number: float) -> float:
        """The greatest of the ranks' numbers."""
        if self.size == 1:
            return number
        numbers: list[float] = [number] * self.size
        dist.all_gather_object(numbers, number)
        return max(numbers)
