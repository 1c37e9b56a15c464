"""Resident memory of this process and its peak during a call, as Linux counts them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

Result = TypeVar("Result")


def resident() -> int:
    """Bytes that are resident now."""
    return _status("VmRSS")


def with_peak(call: Callable[[], Result]) -> tuple[Result, int]:
    """What `call` returns, and the most bytes that were resident while it ran."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from what is resident now
    result = call()
    return result, _status("VmHWM")


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return int(value.split()[0]) * 1024
    raise KeyError(key)
