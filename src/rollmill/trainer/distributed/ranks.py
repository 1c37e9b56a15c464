"""Ranks of a stage: their share of the work, sums over them, and how they form a process group.

Every rank sees the whole batch. It holds the model, or a shard of it, and works on its share of the rows; or, with
tensor parallelism, it holds its share of each layer and works on all rows; or, with context parallelism, it holds the
model and works on its share of each row's tokens. Denominators are those of the whole batch on every rank, so gradients
are simply summed. Collectives use gloo between CPUs and NCCL between GPUs.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Literal, TypeVar

import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import FileStore, Store, TCPStore

from rollmill.trainer.distributed.fsdp import is_sharded
from rollmill.trainer.distributed.tensor_parallel import apply_in_buckets, reduce_replicated_gradients

Sharding = Literal["none", "fsdp", "tensor", "context", "expert"]
_ALL_ROWS = ("tensor", "context")  # every rank works on every row
Result = TypeVar("Result")


@dataclass(frozen=True)
class RankGroup:
    """Rank and number of ranks of this process. With more than one, torch.distributed must be initialized."""

    rank: int = 0
    size: int = 1
    sharding: Sharding = "none"
    """The thing that ranks share: parameters, matrices, experts or the tokens of a row. none: models are whole, and
    rows are dealt out."""

    @staticmethod
    def current() -> RankGroup:
        """Returns the group of torch.distributed, or a single rank."""
        if not dist.is_initialized():
            return RankGroup()
        return RankGroup(dist.get_rank(), dist.get_world_size())

    @property
    def shards_weights(self) -> bool:
        """True if ranks hold parts of the weights."""
        return self.size > 1 and self.sharding in ("fsdp", "tensor", "expert")

    @property
    def shares(self) -> int:
        """Number of shares that the rows of a batch are dealt into."""
        return 1 if self.sharding in _ALL_ROWS else self.size

    @property
    def share(self) -> int:
        """Index of this rank's share."""
        return 0 if self.sharding in _ALL_ROWS else self.rank

    @property
    def even(self) -> bool:
        """True if every rank has to make equally many passes, since they communicate."""
        return self.sharding in ("fsdp", "expert")

    def add(self, tensor: Tensor) -> Tensor:
        """Sums `tensor` over the shares, in place."""
        if self.shares > 1:
            dist.all_reduce(tensor)
        return tensor

    def add_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Sums gradients over the ranks, unless the backward pass did. Parameters without a gradient on any rank keep
        none.
        """
        if self.sharding == "tensor":
            reduce_replicated_gradients(parameters)
        if self.size == 1 or self.sharding in ("fsdp", "tensor"):
            return
        trainable = [p for p in parameters if p.requires_grad]
        present = torch.tensor([float(p.grad is not None) for p in trainable], device=trainable[0].device)
        dist.all_reduce(present)
        shared = [parameter for parameter, count in zip(trainable, present.tolist(), strict=True) if count]
        for parameter in shared:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [parameter.grad for parameter in shared if parameter.grad is not None]
        apply_in_buckets([each for each in gradients if not is_sharded(each)], dist.all_reduce)

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
        """Returns the first of the shares' values that is not None."""
        if self.shares == 1:
            return value
        gathered: list[Result | None] = [None] * self.size
        dist.all_gather_object(gathered, value)
        return next((each for each in gathered if each is not None), None)

    def greatest(self, number: float) -> float:
        """Returns the greatest of the shares' numbers."""
        if self.shares == 1:
            return number
        numbers: list[float] = [number] * self.size
        dist.all_gather_object(numbers, number)
        return max(numbers)


_INTERFACE = "GLOO_SOCKET_IFNAME"
WATCHDOG = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_CLEAN_UP_ONLY = "2"
"""NCCL's watchdog ends what waits for a lost or late rank, and not the process, which then names the rank."""


@dataclass(frozen=True)
class FileRendezvous:
    """Rendezvous of the ranks of one host by a file, without a port that others could connect to.

    They communicate over the loopback interface, so host names need not resolve.
    """

    folder: Path

    def store(self, size: int, deadline: timedelta) -> Store:
        """The store through which ranks exchange addresses."""
        store = FileStore(str(self.folder / "rendezvous"), size)
        store.set_timeout(deadline)
        return store

    def interface(self) -> str | None:
        """The network interface to communicate over."""
        return next(name for _, name in socket.if_nameindex() if name.startswith("lo"))


@dataclass(frozen=True)
class TCPRendezvous:
    """Rendezvous of ranks on several hosts at a port of rank 0's host.

    They communicate over the interfaces that lead there.
    """

    host: str
    port: int

    def store(self, size: int, deadline: timedelta) -> Store:
        """The store through which ranks exchange addresses."""
        return TCPStore(self.host, self.port, timeout=deadline, wait_for_workers=False)

    def interface(self) -> str | None:
        """The interface through which this host reaches that port; None if its address belongs to none of its
        interfaces (NAT).
        """
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((self.host, self.port))  # sends nothing
            own = probe.getsockname()[0]
        found = (name for name, places in psutil.net_if_addrs().items() for place in places if place.address == own)
        return next(found, None)


GroupRendezvous = FileRendezvous | TCPRendezvous


def open_rendezvous_port(host: str) -> tuple[TCPRendezvous, Store]:
    """Opens a port at this address of this host, for as long as the store exists."""
    listening = socket.create_server((host, 0))
    port = listening.getsockname()[1]
    store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())
    return TCPRendezvous(host, port), store


def join_group(rendezvous: GroupRendezvous, rank: int, size: int, device: torch.device, deadline_s: float) -> None:
    """Joins the process group of the ranks.

    Every collective fails after the deadline, and at once if a rank has ended (gloo).
    """
    backend, deadline = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timedelta(seconds=deadline_s)
    store = rendezvous.store(size, deadline)
    with _default(_INTERFACE, rendezvous.interface()), _default(WATCHDOG, _CLEAN_UP_ONLY):
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=deadline)


def leave_group() -> None:
    """Leaves the process group without waiting for the others."""
    if dist.is_initialized():
        dist.destroy_process_group()


def is_process_group_error(error: BaseException) -> bool:
    """True if an error came from a collective, rather than from this rank's own work."""
    return isinstance(error, dist.DistError) or any(word in str(error).lower() for word in ("gloo", "nccl"))


@contextmanager
def _default(variable: str, value: str | None) -> Iterator[None]:
    """Sets an environment variable of torch.distributed, unless the user has set it."""
    if value is None or variable in os.environ:
        yield
        return
    os.environ[variable] = value
    try:
        yield
    finally:
        del os.environ[variable]
