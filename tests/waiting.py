"""Waiting for what another thread or process does."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(happened: Callable[[], bool], limit_s: float = 60.0) -> None:
    ends = time.monotonic() + limit_s
    while not happened():
        assert time.monotonic() < ends
        time.sleep(0.01)
