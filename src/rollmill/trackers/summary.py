"""summary.json: what a run came to, in one object a program can read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollmill.files import atomic_write, to_jsonable
from rollmill.strict_files import read_json_object
from rollmill.trackers.host_memory import lifetime_peak_rss

SUMMARY_FILE = "summary.json"


def write_summary(run_dir: Path, summary: Mapping[str, Any]) -> Path:
    """Write RUN/summary.json atomically; NaN and infinities become null. Returns its path."""
    path = run_dir / SUMMARY_FILE
    atomic_write(path, (json.dumps(to_jsonable(dict(summary)), indent=2, allow_nan=False) + "\n").encode())
    return path


def read_summary(run_dir: Path | str) -> dict[str, Any]:
    """The summary of a run; empty when the run has not ended. Raises CorruptFileError."""
    path = Path(run_dir) / SUMMARY_FILE
    return read_json_object(path) if path.is_file() else {}


def peak_rss_mb() -> float:
    """Largest resident set so far, in MiB, of this process or of any of its finished child processes."""
    return lifetime_peak_rss() / 2**20
