"""The process group of a stage's ranks, all on this machine: gloo between CPUs, NCCL between GPUs."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

_INTERFACE = "GLOO_SOCKET_IFNAME"


def join_group(folder: Path, rank: int, size: int, device: torch.device, deadline_s: float) -> None:
    """Join the ranks that meet in `folder`. Every operation among them fails after the deadline, and at once where one
    has ended (gloo)."""
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    store = FileStore(str(folder / "rendezvous"), size)  # no port that others could connect to
    store.set_timeout(timedelta(seconds=deadline_s))
    with _loopback():
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=deadline_s))


def leave_group() -> None:
    """Leave it without waiting for the others."""
    if dist.is_initialized():
        dist.destroy_process_group()


def of_group(error: BaseException) -> bool:
    """Whether an error came from an operation among ranks, rather than from this one's own work."""
    return isinstance(error, dist.DistError) or any(word in str(error).lower() for word in ("gloo", "nccl"))


@contextmanager
def _loopback() -> Iterator[None]:
    """gloo talks over the loopback interface, unless the user chose one: host names need not lead anywhere."""
    if _INTERFACE in os.environ:
        yield
        return
    os.environ[_INTERFACE] = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    try:
        yield
    finally:
        del os.environ[_INTERFACE]
