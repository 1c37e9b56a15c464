"""Resident memory of this process: resettable peak, and lifetime peak."""

from __future__ import annotations

import ctypes
import os
import re
import resource
import sys
from pathlib import Path

import psutil

_STATUS, _MARKS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_RESET = "5"  # proc(5): resets the peak of the resident set to its current size
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4  # malloc.h
_MALLOC_VARIABLES = ("MALLOC_", "GLIBC_TUNABLES")
_before = 0  # the highest peak before a reset, which the kernel does not keep


def peak_rss() -> int:
    """Largest resident set in bytes since `reset_peak_rss`; the current one where it cannot be reset (not Linux)."""
    if _resets():
        found = re.search(r"VmHWM:\s+(\d+) kB", _STATUS.read_text())
        if found is not None:
            return int(found[1]) * 1024
    return int(psutil.Process().memory_info().rss)


def reset_peak_rss() -> None:
    """Reset the peak to the current size."""
    global _before
    if _resets():
        _before = max(_before, peak_rss())
        _MARKS.write_text(_RESET)


def lifetime_peak_rss() -> int:
    """Largest resident set so far, in bytes, of this process or of any of its finished child processes."""
    peak = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return max(_before, peak if sys.platform == "darwin" else peak * 1024)


def _resets() -> bool:
    return os.access(_MARKS, os.W_OK)


def keep_freed_blocks() -> None:
    """Make glibc keep freed memory for the next blocks, from now on; of its heap's free end, up to 2 GiB.

    By default each block of more than 32 MiB is returned to the system at once, and so is the heap's free end. An
    optimizer step asks for the same blocks again and again, and the system clears every page that it hands out: at 135M
    parameters this took a tenth of the step. `trim_heap` and `return_large_blocks` return what was kept.
    """
    _set_malloc({_M_MMAP_MAX: 0, _M_TRIM_THRESHOLD: (1 << 31) - 1})


def return_large_blocks() -> None:
    """Make glibc return each block of at least 1 MiB to the system as soon as it is freed, from now on.

    By default it learns to keep blocks of up to 32 MiB in its heap. Weights, gradients and moments are then allocated
    between activations, and what is free between them stays in memory: a run of 0.6B parameters took 2.7 GiB more, and
    no less time on a CPU without AMX.
    """
    _set_malloc({_M_MMAP_MAX: 1 << 16, _M_MMAP_THRESHOLD: 1 << 20, _M_TRIM_THRESHOLD: 1 << 24})
    trim_heap()


def _set_malloc(options: dict[int, int]) -> None:
    """Set options of glibc's allocator, unless there are any in the environment."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt") and not any(name.startswith(_MALLOC_VARIABLES) for name in os.environ):
        for option, value in options.items():
            libc.mallopt(option, value)


def trim_heap() -> None:
    """Return freed memory to the system, which glibc would keep for reuse."""
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)
