"""Bytes from one process to several others at once: a broadcast in buckets, by gloo, or by NCCL between GPUs.

The groups are made apart from torch.distributed's default one, which the trainer's ranks may have, and which knows no
members that come and go.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import BroadcastOptions, PrefixStore, ProcessGroupGloo, Store

BUCKET_BYTES = 64 << 20
"""Bytes that go at once; gloo ends processes that disagree about it."""
_POLL_S = 0.001
_WATCHDOG = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


class BroadcastGroup:
    """One member of a group, in which rank 0 sends. All members make theirs at the same time.

    Args:
        store: where they find each other.
        number: of the group; each has another one.
        host: the address of this host by which the others reach it.
        device: the GPU of this member, for NCCL; None: gloo.
        deadline_s: how long the others may take to come, and each bucket to arrive.

    Raises:
        RuntimeError: another member did not come in time. The methods raise it where one has ended, or is too slow.
    """

    def __init__(
        self,
        store: Store,
        number: int,
        rank: int,
        size: int,
        host: str,
        *,
        device: torch.device | None = None,
        deadline_s: float = 30.0,
    ) -> None:
        self.number, self._rank, self._device, self._deadline_s = number, rank, device, deadline_s
        meeting = PrefixStore(f"group/{number}", store)
        make = _gloo if device is None else _nccl
        self._group: Any = make(meeting, rank, size, host, timedelta(seconds=deadline_s))

    def broadcast(self, block: Tensor) -> None:
        """Make the bytes of a block in host memory (uint8) what they are on rank 0."""
        options = BroadcastOptions()
        options.rootRank = 0
        group = self._group  # until the end of this call, whoever closes it meanwhile
        if group is None:
            raise RuntimeError("the group was left")
        for part in block.split(BUCKET_BYTES):
            moved = part if self._device is None else part.to(self._device)
            self._finish(group.broadcast([moved], options))
            if self._rank > 0 and moved is not part:
                part.copy_(moved)

    def close(self) -> None:
        """Leave: what the others still wait for fails at once. May be called twice, and in another thread."""
        group, self._group = self._group, None  # gloo closes its connections when nothing refers to it
        if group is not None and self._device is not None:
            group.abort()

    def _finish(self, work: Any) -> None:
        if self._device is None:
            work.wait()
            return
        ends = time.monotonic() + self._deadline_s
        while not work.is_completed():  # to wait for NCCL would be to wait for ever where another one has ended
            if time.monotonic() > ends:
                raise RuntimeError(f"a bucket did not arrive within {self._deadline_s:.0f} s")
            time.sleep(_POLL_S)


def gpu_uuid(device: torch.device) -> str:
    """What tells a GPU from all others; "" for a CPU, and where this torch has no NCCL."""
    if device.type != "cuda" or not dist.is_nccl_available():
        return ""
    return str(torch.cuda.get_device_properties(device).uuid)


def _gloo(store: Store, rank: int, size: int, host: str, deadline: timedelta) -> Any:
    made: Any = ProcessGroupGloo
    options = made._Options()
    options._devices = [made.create_device(hostname=host)]
    options._timeout = deadline
    return made(store, rank, size, options)


def _nccl(store: Store, rank: int, size: int, host: str, deadline: timedelta) -> Any:
    """NCCL finds the way by itself (NCCL_SOCKET_IFNAME). Its watchdog would end this process when another one ends."""
    from torch._C._distributed_c10d import ProcessGroupNCCL

    before = os.environ.get(_WATCHDOG)
    os.environ[_WATCHDOG] = "0"
    try:
        return ProcessGroupNCCL(store, rank, size, ProcessGroupNCCL.Options())
    finally:
        del os.environ[_WATCHDOG]
        if before is not None:
            os.environ[_WATCHDOG] = before
