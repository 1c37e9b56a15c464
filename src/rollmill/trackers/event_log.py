"""Events of a run, such as restarts: events.jsonl, which `rollmill status`, the summary and the report read.

Unlike metrics, events are kept when a run goes back to an earlier step: they tell what happened.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from rollmill.files import explain_write_errors

EVENTS_FILE = "events.jsonl"
RESTART = "restart"
"""The process that trains was started again: `step`, the furthest one; `reason`; `change` of settings, if any."""
INCIDENT = "incident"
"""Something failed, or works again, and the run went on: `text`; `process`, unless it is the one that trains."""
STUCK = "stuck"
"""The run no longer learns (see monitor.stuck_after): `step`; `text`."""
CHANGED = "changed"
"""`rollmill resume --set` changed settings: the `step` of the newest checkpoint; `changes` in words."""
SCALE = "scale"
"""`rollmill scale` was answered: the numbers of explorers `before` and now (`explorers`); `text`."""
DAMAGED = "damaged"
"""In place of a line that cannot be read: its number as `line`."""


def record_event(run_dir: Path, event: str, **details: Any) -> None:
    """Append an event, with the time in seconds since the epoch. Raises RollmillError if the file cannot be written."""
    path = run_dir / EVENTS_FILE
    line = json.dumps({"time": time.time(), "event": event, **details}) + "\n"
    with explain_write_errors(path), path.open("ab+") as file:
        size = file.seek(0, os.SEEK_END)
        torn = size > 0 and os.pread(file.fileno(), 1, size - 1) != b"\n"  # a killed process left half a line
        file.write(b"\n" * torn + line.encode())  # in one call, since several processes may write events


def read_events(run_dir: Path, event: str | None = None) -> list[dict[str, Any]]:
    """Read the events of a run, in order; only those of one kind, if given.

    Nothing depends on an event, so a damaged line is no error: see DAMAGED. A last line without its end is left out.
    """
    path = run_dir / EVENTS_FILE
    lines = path.read_bytes().split(b"\n")[:-1] if path.is_file() else []
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        when = rows[-1]["time"] if rows else path.stat().st_mtime
        rows.append(_parse(line) or {"time": when, "event": DAMAGED, "line": number})
    return [row for row in rows if event is None or row["event"] == event]


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    whole = isinstance(row, dict) and isinstance(row.get("time"), int | float) and isinstance(row.get("event"), str)
    return row if whole else None
