"""Waiting for groups, with a deadline that names who should have written them."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from rollmill.errors import DeadlineError

Result = TypeVar("Result")

_FIRST_S, _LONGEST_S = 0.005, 0.5


def poll_until(attempt: Callable[[], Result | None], deadline_s: float) -> Result | None:
    """What `attempt` gives once it is not None; None after `deadline_s`. Waits longer and longer in between."""
    end, pause = time.monotonic() + deadline_s, _FIRST_S
    while True:
        found = attempt()
        left = end - time.monotonic()
        if found is not None or left <= 0:
            return found
        time.sleep(min(pause, left))
        pause = min(2 * pause, _LONGEST_S)


def writer_identity(kind: str) -> dict[str, Any]:
    """What tells this writer from others."""
    return {"kind": kind, "host": socket.gethostname(), "pid": os.getpid()}


def too_few_groups_error(
    wanted: int, there: int, seconds: float, writers: Sequence[Mapping[str, Any]]
) -> DeadlineError:
    """The error of a reader that got too few groups; `writers` are rows of the table, the one last seen first."""
    advice = (
        f"{there} of {wanted} groups are there. Look at that process and its log: start it again if it has ended, "
        "raise rollout.deadline_s if it is only slow, or loosen what the pipeline drops."
    )
    return DeadlineError("the trainer", _named(writers), seconds, advice)


def _named(writers: Sequence[Mapping[str, Any]]) -> str:
    if not writers:
        return "a writer of groups (none has ever opened this buffer)"
    newest = writers[0]
    here = newest["host"] == socket.gethostname()
    place = f"process {newest['pid']} on {newest['host']}"
    if here and not _alive(newest["pid"]):
        place += ", which no longer runs"
    if newest["wrote_at"] is None:
        return f"the {newest['kind']} ({place}; it has written nothing yet)"
    ago = max(0.0, time.time() - newest["wrote_at"])
    return f"the {newest['kind']} ({place}; it last wrote {ago:.0f} s ago, {newest['written']} groups in all)"


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
