"""Resident memory of this process and its peak during a call, as Linux counts them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

Result = TypeVar("Result")


def resident() -> int:
    """Resident bytes."""
    return _status("VmRSS")


def with_peak(call: Callable[[], Result]) -> tuple[Result, int]:
    """Result of `call`, and peak resident bytes while it ran."""
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak to the current size
    result = call()
    return result, _status("VmHWM")


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return int(value.split()[0]) * 1024
    raise KeyError(key)
