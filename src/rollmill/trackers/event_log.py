"""Events of a run, such as restarts: events.jsonl, which `rollmill status`, the summary and the report read.

Unlike metrics, events are kept when a run goes back to an earlier step: they tell what happened.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from rollmill.files import explain_write_errors
from rollmill.trackers.metrics_log import read_jsonl_rows

EVENTS_FILE = "events.jsonl"
RESTART = "restart"
"""The process that trains was started again: `step`, the furthest one; `reason`; `change` of settings, if any."""


def record_event(run_dir: Path, event: str, **details: Any) -> None:
    """Append an event, with the time in seconds since the epoch. Raises RollmillError if the file cannot be written."""
    path = run_dir / EVENTS_FILE
    line = json.dumps({"time": time.time(), "event": event, **details}) + "\n"
    with explain_write_errors(path), path.open("ab") as file:
        file.write(line.encode())  # in one call, since several processes may write events


def read_events(run_dir: Path, event: str | None = None) -> list[dict[str, Any]]:
    """Read the events of a run, in order; only those of one kind, if given. Raises RollmillError on a damaged line."""
    rows = read_jsonl_rows(run_dir / EVENTS_FILE)
    return [row for row in rows if event is None or row.get("event") == event]
