"""Processes of this machine, as /proc shows them."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path


def children(pid: int) -> list[int]:
    """Processes that a process has started and not reaped yet, oldest first."""
    found = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError):  # it has just ended
            if int(_stat(int(name))[1]) == pid:
                found.append(int(name))
    return sorted(found)


def descendants(pid: int) -> list[int]:
    """The children of a process and theirs; a parent comes before its children."""
    found = children(pid)
    for each in found:
        found += children(each)
    return found


def runs(pid: int) -> bool:
    """True if a process has not ended; a zombie has."""
    with suppress(OSError):
        return _stat(pid)[0] != "Z"
    return False


def count_open_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def becomes_childless(pid: int, limit_s: float = 10.0) -> bool:
    """True if a process comes to have no process below it."""
    ends = time.monotonic() + limit_s
    while descendants(pid):
        if time.monotonic() > ends:
            return False
        time.sleep(0.005)
    return True


def _stat(pid: int) -> list[str]:
    """The fields of a process's `stat` after its name: its state, its parent and so on."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
