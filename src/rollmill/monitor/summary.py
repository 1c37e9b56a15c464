"""summary.json: what a run came to, in one object a program can read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollmill.core.user_files import read_mapping
from rollmill.monitor.files import atomic_write, plain
from rollmill.monitor.memory import highest_rss

FILE = "summary.json"


def write_summary(run_dir: Path, summary: Mapping[str, Any]) -> Path:
    """Write RUN/summary.json atomically; NaN and infinities become null. Returns its path."""
    path = run_dir / FILE
    atomic_write(path, (json.dumps(plain(dict(summary)), indent=2, allow_nan=False) + "\n").encode())
    return path


def read_summary(run_dir: Path | str) -> dict[str, Any]:
    """The summary of a run; empty when the run has not ended. Raises DamagedFileError."""
    path = Path(run_dir) / FILE
    return read_mapping(path) if path.is_file() else {}


def peak_rss_mb() -> float:
    """Largest resident set so far, in MiB, of this process or of any of its finished child processes."""
    return highest_rss() / 2**20
