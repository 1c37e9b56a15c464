"""Worker side of the protocol: JSON lines on stdout; output of libraries is redirected to stderr."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any


class Channel:
    """Reads the parent's commands and sends replies. Create it before importing anything that starts threads."""

    def __init__(self) -> None:
        core = os.environ.get("ROLLMILL_BENCH_CORE")
        if core is not None and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, {int(core)})
        self._out = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)

    def say(self, **message: Any) -> None:
        """Send one JSON line."""
        self._out.write(json.dumps(message) + "\n")

    def commands(self) -> Iterator[dict[str, Any]]:
        """The parent's commands, until it closes the pipe."""
        for line in sys.stdin:
            yield json.loads(line)


def serve(channel: Channel, run: Callable[[], dict[str, Any]], **ready: Any) -> None:
    """Send `ready`, then reply to each command with the result of `run()`."""
    channel.say(**ready)
    for _ in channel.commands():
        channel.say(**run())


def versions(*packages: str) -> dict[str, str]:
    """Installed versions of Python and `packages`."""
    found = {"python": sys.version.split()[0]}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
