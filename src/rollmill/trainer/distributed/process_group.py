"""The process group of a stage's ranks: how they find each other; gloo between CPUs, NCCL between GPUs."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, Store, TCPStore

_INTERFACE = "GLOO_SOCKET_IFNAME"


@dataclass(frozen=True)
class FileRendezvous:
    """Ranks of one host find each other by a file, without a port that others could connect to, and talk over the
    loopback interface: host names need not lead anywhere."""

    folder: Path

    def store(self, size: int, deadline: timedelta) -> Store:
        """What they tell each other their addresses by."""
        store = FileStore(str(self.folder / "rendezvous"), size)
        store.set_timeout(deadline)
        return store

    def interface(self) -> str | None:
        """What they talk over."""
        return next(name for _, name in socket.if_nameindex() if name.startswith("lo"))


@dataclass(frozen=True)
class TCPRendezvous:
    """Ranks of several hosts find each other at a port of the first one's, and talk over the interfaces that lead
    there."""

    host: str
    port: int

    def store(self, size: int, deadline: timedelta) -> Store:
        """What they tell each other their addresses by."""
        return TCPStore(self.host, self.port, timeout=deadline, wait_for_workers=False)

    def interface(self) -> str | None:
        """What this host reaches that port over; None: it has another address there than it knows of."""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((self.host, self.port))  # sends nothing
            own = probe.getsockname()[0]
        found = (name for name, places in psutil.net_if_addrs().items() for place in places if place.address == own)
        return next(found, None)


GroupRendezvous = FileRendezvous | TCPRendezvous


def open_rendezvous_port(host: str) -> tuple[TCPRendezvous, Store]:
    """A port at this address of this host, as long as the store exists."""
    listening = socket.create_server((host, 0))
    port = listening.getsockname()[1]
    store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())
    return TCPRendezvous(host, port), store


def join_group(meeting: GroupRendezvous, rank: int, size: int, device: torch.device, deadline_s: float) -> None:
    """Join the ranks that meet there. Every operation among them fails after the deadline, and at once where one has
    ended (gloo)."""
    backend, deadline = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timedelta(seconds=deadline_s)
    store = meeting.store(size, deadline)
    with _over(meeting.interface()):
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=deadline)


def leave_group() -> None:
    """Leave it without waiting for the others."""
    if dist.is_initialized():
        dist.destroy_process_group()


def is_process_group_error(error: BaseException) -> bool:
    """Whether an error came from an operation among ranks, rather than from this one's own work."""
    return isinstance(error, dist.DistError) or any(word in str(error).lower() for word in ("gloo", "nccl"))


@contextmanager
def _over(interface: str | None) -> Iterator[None]:
    """gloo talks over this interface, unless the user chose one."""
    if interface is None or _INTERFACE in os.environ:
        yield
        return
    os.environ[_INTERFACE] = interface
    try:
        yield
    finally:
        del os.environ[_INTERFACE]
