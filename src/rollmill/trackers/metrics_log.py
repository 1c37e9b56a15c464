"""Metrics of a run: the tracker protocol, metrics.jsonl (one JSON object per step), and summary.json."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from rollmill.config.yaml_file import read_plain_yaml
from rollmill.errors import RollmillError
from rollmill.files import atomic_write, explain_write_errors, read_json_object, to_jsonable
from rollmill.types import Experience

Metric = float | int | str | None
Metrics = Mapping[str, Metric]

METRICS_FILE = "metrics.jsonl"
SERVICE_IDS_FILE = "trackers.json"


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """The run that a tracker follows. Steps after `resumed_after` are repeated, where it is given."""

    folder: Path
    name: str
    resumed_after: int | None = None

    def settings(self) -> dict[str, Any]:
        """Read the resolved run file; empty if there is none."""
        path = self.folder / "config.yaml"
        found = read_plain_yaml(path) if path.is_file() else {}
        return found if isinstance(found, dict) else {}

    def service_id(self, service: str) -> str | None:
        """Read the id that a service has given the run, from RUN/trackers.json. Raises CorruptFileError."""
        path = self.folder / SERVICE_IDS_FILE
        found = read_json_object(path).get(service) if path.is_file() else None
        return None if found is None else str(found)

    def keep_service_id(self, service: str, run_id: str) -> None:
        """Store the id, so that the run continues under it when it resumes."""
        path = self.folder / SERVICE_IDS_FILE
        ids = (read_json_object(path) if path.is_file() else {}) | {service: run_id}
        atomic_write(path, (json.dumps(ids, indent=2) + "\n").encode())


def numbers(metrics: Metrics) -> dict[str, float]:
    """Return the metrics that are numbers, without `step`; what was not measured is left out."""
    return {name: value for name, value in metrics.items() if name != "step" and isinstance(value, float | int)}


def is_finite_number(value: object) -> bool:
    """True for a number that is neither infinite nor nan: what a chart can show."""
    return isinstance(value, float | int) and math.isfinite(value)


class Tracker(Protocol):
    """Receives the metrics of a run. It is built from a `TrackedRun`, and again when the run resumes."""

    def write(self, metrics: Metrics, experiences: Sequence[Experience] = ()) -> None:
        """Record the numbers of a step or an evaluation by their names, and the experiences it trained on.

        `metrics["step"]` counts over all stages; metrics of one step may come in several calls.
        """
        ...

    def close(self) -> None:
        """Flush and close."""
        ...


class MetricsLog:
    """Appends metrics to a file, one line per step, flushed at once.

    Continues an existing file; removes the incomplete last line of a killed run.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: BinaryIO | None = None
        self._last: dict[str, Any] = {}
        self._rewrite(read_jsonl_rows(path))

    def append(self, metrics: Metrics) -> None:
        """Write the metrics of `metrics["step"]`. A second call for the same step adds its keys to that step's line.

        NaN and infinities are written as null. Raises RollmillError if the file cannot be written, or was removed.
        """
        row = to_jsonable(dict(metrics))
        assert isinstance(row.get("step"), int), "metrics need an integer step"
        self._require_file()
        if self._last.get("step") == row["step"]:
            rows = read_jsonl_rows(self.path)[:-1]
            self._rewrite([*rows, self._last | row])
            return
        assert self._file is not None
        with explain_write_errors(self.path):
            self._file.write(_line(row))
            self._file.flush()
        self._last = row

    def truncate_after(self, step: int) -> None:
        """Remove the lines of later steps, atomically."""
        self._rewrite([row for row in read_jsonl_rows(self.path) if row["step"] <= step])

    def sync(self) -> None:
        """Flush the lines to the disk, so that they survive a power failure."""
        assert self._file is not None, "the log is closed"
        with explain_write_errors(self.path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file; closing twice is harmless."""
        if self._file is not None:
            with explain_write_errors(self.path):
                self._file.close()
            self._file = None

    def _require_file(self) -> None:
        assert self._file is not None, "the log is closed"
        try:
            there = os.path.samestat(os.fstat(self._file.fileno()), os.stat(self.path))
        except FileNotFoundError:
            there = False
        if not there:
            raise RollmillError(
                f"{self.path} was removed or replaced while the run went on, so nothing would be left of the run; put "
                "its directory back and resume it, or start again"
            )

    def _rewrite(self, rows: list[dict[str, Any]]) -> None:
        self.close()
        atomic_write(self.path, b"".join(map(_line, rows)), durable=True)
        with explain_write_errors(self.path):
            self._file = self.path.open("ab")
        self._last = rows[-1] if rows else {}


def read_metrics(run_dir: Path | str) -> list[dict[str, Any]]:
    """Read the metrics of a run, one mapping per step in the order written. Raises RollmillError on a damaged line.

    Leaves out a last line that is still being written.
    """
    return read_jsonl_rows(Path(run_dir) / METRICS_FILE)


def wilson_interval(successes: float, n: float, z: float = 1.96) -> tuple[float, float]:
    """Confidence interval of a success rate (Wilson, JASA 22, 1927); z = 1.96 covers 95 %. (0, 1) when n is 0."""
    if n == 0:
        return 0.0, 1.0
    rate = successes / n
    centre = rate + z * z / (2 * n)
    spread = z * math.sqrt(rate * (1 - rate) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)


def _line(row: dict[str, Any]) -> bytes:
    return json.dumps(row, allow_nan=False).encode() + b"\n"


def read_jsonl_rows(path: Path) -> list[dict[str, Any]]:
    """Read the rows of a JSONL file, without an incomplete last line. Raises RollmillError on a damaged line."""
    if not path.is_file():
        return []
    lines = path.read_bytes().split(b"\n")
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise ValueError(f"{type(row).__name__}, not an object")
            rows.append(row)
        except (ValueError, RecursionError) as error:
            if number == len(lines):  # no newline yet: a killed run's last write, or one in progress
                break
            raise RollmillError(
                f"{path}:{number} is not JSON ({error}). Remove the line, or start a new run."
            ) from error
    return rows


SUMMARY_FILE = "summary.json"


def write_summary(run_dir: Path, summary: Mapping[str, Any]) -> Path:
    """Write RUN/summary.json atomically; NaN and infinities become null. Returns its path."""
    path = run_dir / SUMMARY_FILE
    atomic_write(
        path, (json.dumps(to_jsonable(dict(summary)), indent=2, allow_nan=False) + "\n").encode(), durable=True
    )
    return path


def read_summary(run_dir: Path | str) -> dict[str, Any]:
    """Read the summary of a run; empty if the run has not ended. Raises CorruptFileError."""
    path = Path(run_dir) / SUMMARY_FILE
    return read_json_object(path) if path.is_file() else {}


def peak_rss_mb() -> float:
    """Largest resident set so far, in MiB, of this process or of any of its finished child processes."""
    from rollmill.models.cpu.host_memory import lifetime_peak_rss

    return lifetime_peak_rss() / 2**20
