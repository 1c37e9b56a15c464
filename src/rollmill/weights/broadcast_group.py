"""Broadcasts bytes from one process to several others, in buckets, by gloo, or by NCCL between GPUs.

The groups are separate from torch.distributed's default group, which the trainer's ranks may use and whose members
cannot change.
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
"""Bytes sent at once; gloo ends processes that disagree about it."""
_POLL_S = 0.001
_WATCHDOG = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


class BroadcastGroup:
    """One member of a group, in which rank 0 sends. All members create theirs at the same time.

    Args:
        store: store for their rendezvous.
        number: unique number of the group.
        host: address of this host that the others can reach.
        device: this member's GPU, for NCCL; None: gloo.
        deadline_s: timeout for the others to join, and for each bucket to arrive.

    Raises:
        RuntimeError: another member did not join in time. The methods raise it if one has ended, or is too slow.
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
        group_store = PrefixStore(f"group/{number}", store)
        make = _gloo if device is None else _nccl
        self._group: Any = make(group_store, rank, size, host, timedelta(seconds=deadline_s))

    def broadcast(self, block: Tensor) -> None:
        """Sends rank 0's block in host memory (uint8) into the blocks of the others."""
        options = BroadcastOptions()
        options.rootRank = 0
        group = self._group  # keeps it alive during this call, even if `close` is called meanwhile
        if group is None:
            raise RuntimeError("the group was left")
        if self._device is not None:
            self._broadcast_from_gpu(group, options, block, self._device)
            return
        for part in block.split(BUCKET_BYTES):
            self._finish(group.broadcast([part], options))

    def _broadcast_from_gpu(self, group: Any, options: BroadcastOptions, block: Tensor, device: torch.device) -> None:
        """Sends buckets between GPUs, two at a time; they come from host memory, or go there, through pinned memory."""
        size = min(BUCKET_BYTES, len(block))
        there = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2)]
        here = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        sent: list[tuple[Any, Tensor] | None] = [None, None]

        def finish(slot: int) -> None:
            if (earlier := sent[slot]) is None:
                return
            work, part = earlier
            self._finish(work)
            if self._rank > 0:
                part.copy_(here[slot][: len(part)].copy_(there[slot][: len(part)]))

        parts = block.split(BUCKET_BYTES)
        for number, part in enumerate(parts):
            slot = number % 2
            finish(slot)
            bucket = there[slot][: len(part)]
            if self._rank == 0:
                bucket.copy_(here[slot][: len(part)].copy_(part), non_blocking=True)
            sent[slot] = group.broadcast([bucket], options), part
        for number in (len(parts), len(parts) + 1):
            finish(number % 2)

    def close(self) -> None:
        """Leaves the group: pending operations of the others fail at once. Idempotent and thread-safe."""
        group, self._group = self._group, None  # gloo closes its connections with the last reference
        if group is not None and self._device is not None:
            group.abort()

    def _finish(self, work: Any) -> None:
        if self._device is None:
            work.wait()
            return
        ends = time.monotonic() + self._deadline_s
        while not work.is_completed():  # NCCL's own wait would hang if another member has ended
            if time.monotonic() > ends:
                raise RuntimeError(f"a bucket did not arrive within {self._deadline_s:.0f} s")
            time.sleep(_POLL_S)


def gpu_uuid(device: torch.device) -> str:
    """Unique id of a GPU; "" for a CPU, or if this torch has no NCCL."""
    if device.type != "cuda" or not dist.is_nccl_available():
        return ""
    return str(torch.cuda.get_device_properties(device).uuid)


def _gloo(store: Store, rank: int, size: int, host: str, deadline: timedelta) -> Any:
    group_class: Any = ProcessGroupGloo
    options = group_class._Options()
    options._devices = [group_class.create_device(hostname=host)]
    options._timeout = deadline
    return group_class(store, rank, size, options)


def _nccl(store: Store, rank: int, size: int, host: str, deadline: timedelta) -> Any:
    """Creates an NCCL group, without its watchdog, which would end this process when another one ends.

    NCCL chooses the network by itself (NCCL_SOCKET_IFNAME).
    """
    from torch._C._distributed_c10d import ProcessGroupNCCL

    before = os.environ.get(_WATCHDOG)
    os.environ[_WATCHDOG] = "0"
    options = ProcessGroupNCCL.Options()
    options._timeout = deadline
    try:
        return ProcessGroupNCCL(store, rank, size, options)
    finally:
        del os.environ[_WATCHDOG]
        if before is not None:
            os.environ[_WATCHDOG] = before
