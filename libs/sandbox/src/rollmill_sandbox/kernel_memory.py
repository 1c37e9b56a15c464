"""The memory of the kernel that a program can make it hold, and how many programs may do so at once.

`memory_mb` limits a program's address space, and the kernel kills whoever has most of it when memory ends. Neither
holds for memory that the kernel itself needs for a program: contents of sockets, items of epoll, inodes. Where no
control group counts it, the sandbox bounds what can take it (few open files, no large buffers, few locks: see
`allowed_syscalls` and `file_locks`) and runs only so many programs at once that the worst of them fit into the machine.
"""

from __future__ import annotations

import math
import os
from contextlib import suppress
from functools import cache
from pathlib import Path

from rollmill_sandbox.file_locks import LOCK_BYTES, LOCKS
from rollmill_sandbox.limits import INODES, OPEN_FILES, SandboxLimits

SHARE_OF_PROGRAMS, SHARE_OF_SESSIONS = 0.25, 0.5
"""Shares of the machine's memory that programs at once, and open sessions, may make the kernel hold."""
_SOCKET_BYTES = 212_992
_MESSAGE_BYTES = 32 << 10  # the last message may go beyond a socket's buffer
_EPOLL_ITEM_BYTES = 256
_INODE_BYTES = 2 << 10  # with its name and attributes
_MAPPING_BYTES, _MAPPINGS = 400, 65_530  # vm.max_map_count
_TASK_BYTES = 32 << 10  # its stack and structure
_PAGE = 4 << 10


def kernel_memory_mb(limits: SandboxLimits) -> int:
    """Return the most memory of the kernel, MiB, that a program with these limits can take, files included.

    Page tables are left out: like a program's own memory they make the kernel choose it when memory ends.
    """
    several = limits.processes > 1
    processes = limits.processes + limits.threads if several else 1  # each thread of the limit may be a process
    files = processes * OPEN_FILES + (2 * OPEN_FILES if several else 0)  # those in messages count once per user
    taken = files * (_buffer_bytes() + _MESSAGE_BYTES)
    if not several:  # half of the files watch the others, each under every number
        taken += (OPEN_FILES // 2) ** 2 * OPEN_FILES * _EPOLL_ITEM_BYTES
    else:
        taken += LOCKS * LOCK_BYTES
    taken += processes * min(_MAPPINGS, (limits.memory_mb << 20) // _PAGE) * _MAPPING_BYTES
    taken += (limits.processes + limits.threads) * _TASK_BYTES + INODES * _INODE_BYTES
    return math.ceil(taken / (1 << 20)) + limits.disk_mb


def count_slots(limits: SandboxLimits, slots: int, share: float) -> int:
    """Return how many of `slots` a program takes, so that the worst programs at once fit into a share of the memory."""
    return min(slots, max(1, math.ceil(kernel_memory_mb(limits) * slots / (machine_memory_mb() * share))))


@cache
def machine_memory_mb() -> float:
    """Return the memory of this machine, or of the container if that has less, MiB."""
    least = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):  # another version, or "max"
            least = min(least, int(Path(path).read_text()))
    return least / (1 << 20)


@cache
def _buffer_bytes() -> int:
    """Return the buffer of a new socket; it is at least Linux's default, which an administrator may raise."""
    try:
        return max(_SOCKET_BYTES, int(Path("/proc/sys/net/core/wmem_default").read_text()))
    except (OSError, ValueError):
        return _SOCKET_BYTES
