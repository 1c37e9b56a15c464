"""Ranks: every one sees the whole batch. It holds the model, or its shard of it, and works on its share of the rows; or
it holds its share of each layer, and works on all rows.

Denominators are those of the whole batch on every rank, so gradients only add up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rollmill.trainer.distributed.buckets import apply_in_buckets
from rollmill.trainer.distributed.tensor_parallel import reduce_replicated_gradients

Sharding = Literal["none", "fsdp", "tensor"]
Result = TypeVar("Result")


@dataclass(frozen=True)
class RankGroup:
    """Which of how many ranks this process is. With more than one, torch.distributed has to be initialised."""

    rank: int = 0
    size: int = 1
    sharding: Sharding = "none"  #: whether models are whole on every rank, see sharding.py and tensor_parallel.py

    @staticmethod
    def current() -> RankGroup:
        """Those of torch.distributed, or the only one."""
        if not dist.is_initialized():
            return RankGroup()
        return RankGroup(dist.get_rank(), dist.get_world_size())

    @property
    def shares(self) -> int:
        """How many shares the rows of a batch are dealt into."""
        return 1 if self.sharding == "tensor" else self.size

    @property
    def share(self) -> int:
        """Which of them is this rank's."""
        return 0 if self.sharding == "tensor" else self.rank

    def add(self, tensor: Tensor) -> Tensor:
        """The sum of `tensor` over the shares, in place."""
        if self.shares > 1:
            dist.all_reduce(tensor)
        return tensor

    def add_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Sum gradients over the shares, unless that was done in the backward pass; what has none on any rank keeps
        none."""
        if self.sharding == "tensor":
            reduce_replicated_gradients(parameters)
        if self.shares == 1 or self.sharding == "fsdp":
            return
        trainable = [p for p in parameters if p.requires_grad]
        device = trainable[0].device
        present = self.add(torch.tensor([float(p.grad is not None) for p in trainable], device=device))
        shared = [parameter for parameter, count in zip(trainable, present.tolist(), strict=True) if count]
        for parameter in shared:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        apply_in_buckets([parameter.grad for parameter in shared if parameter.grad is not None], dist.all_reduce)

    def merged(self, numbers: dict[str, float]) -> dict[str, float]:
        """Sums by name over the shares; a name may be missing on some."""
        if self.shares == 1:
            return numbers
        gathered: list[dict[str, float]] = [{}] * self.size
        dist.all_gather_object(gathered, numbers)
        total: dict[str, float] = {}
        for each in gathered:
            for name, value in each.items():
                total[name] = total.get(name, 0.0) + value
        return total

    def first(self, value: Result | None) -> Result | None:
        """The first of the shares' values that is not None."""
        if self.shares == 1:
            return value
        gathered: list[Result | None] = [None] * self.size
        dist.all_gather_object(gathered, value)
        return next((each for each in gathered if each is not None), None)

    def greatest(self, number: float) -> float:
        """The greatest of the shares' numbers."""
        if self.shares == 1:
            return number
        numbers: list[float] = [number] * self.size
        dist.all_gather_object(numbers, number)
        return max(numbers)
