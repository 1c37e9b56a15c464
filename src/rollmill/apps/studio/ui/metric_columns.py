"""Metrics of a run as columns: read as the file grows, and thinned out to what a chart can show."""

from __future__ import annotations

import json
import os
import threading
import zlib
from array import array
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
import numpy.typing as npt

from rollmill.trackers.metrics_log import METRICS_FILE

XAxis = Literal["step", "tokens", "seconds"]
_PIECE = 2**20
_STEPS, _LARGEST = 2**53, 1e300  # larger numbers are of no run
_CACHED_BYTES = 256 * 2**20
_TIMES = ("seconds/total", "seconds/eval", "seconds/checkpoint")

Numbers = npt.NDArray[np.float64]


@dataclass(slots=True)
class _Column:
    """The rows that have a metric, and its values in them."""

    rows: array[int] = field(default_factory=lambda: array("l"))
    values: array[float] = field(default_factory=lambda: array("d"))


@dataclass(frozen=True, slots=True)
class Curve:
    """Points of a metric; [N] each. Of thinned out points, `y` is the mean, `low` and `high` are the extremes."""

    x: Numbers
    y: Numbers
    low: Numbers | None
    high: Numbers | None


class MetricColumns:
    """The metrics file of one run. `refresh` reads what is new; a file that a resumed run replaced is read again.

    An evaluation rewrites the file with more keys in its last row. So all but the last row is compared by a checksum,
    and then only that row is parsed again.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._clear()

    def _clear(self) -> None:
        self._inode, self._read = 0, 0  # bytes that were parsed
        self._last_start, self._checksum_before_last, self._checksum = 0, 0, 0
        self._last_bytes, self._last_checksum = 0, 0
        self.steps: array[int] = array("q")
        self.stages: list[str] = []  #: names, in the order in which they came
        self._stage_of: array[int] = array("h")
        self._columns: dict[str, _Column] = {}
        self.damaged = 0  #: lines that are no JSON objects
        self._axes: dict[str, Numbers] = {}

    @property
    def bytes(self) -> int:
        """Memory that the columns take, about."""
        return 10 * len(self.steps) + sum(16 * len(column.rows) + 500 for column in self._columns.values())

    @property
    def keys(self) -> list[str]:
        """Names of the metrics that are numbers, in the order in which they came."""
        return list(self._columns)

    def refresh(self) -> None:
        """Read what was added to the file. A missing file is an empty one."""
        try:
            with self._path.open("rb") as file:
                status = os.fstat(file.fileno())
                if status.st_ino == self._inode and status.st_size == self._read:
                    return
                if status.st_ino != self._inode or status.st_size < self._read or not self._has_last_line(file):
                    self._reopen(file, status)
                if status.st_size > self._read:
                    self._parse(file)
        except FileNotFoundError:
            self._clear()

    def _has_last_line(self, file: BinaryIO) -> bool:
        """False if another file has taken the inode of one that was replaced twice meanwhile."""
        file.seek(self._read - self._last_bytes)
        return zlib.crc32(file.read(self._last_bytes)) == self._last_checksum

    def _reopen(self, file: BinaryIO, status: os.stat_result) -> None:
        keep = self._last_start if len(self.steps) and status.st_size >= self._last_start else 0
        checksum, left = 0, keep
        file.seek(0)
        while left and (piece := file.read(min(_PIECE, left))):
            checksum, left = zlib.crc32(piece, checksum), left - len(piece)
        if keep and not left and checksum == self._checksum_before_last:
            self._drop_last_row()
            self._read, self._checksum = keep, checksum
            self._last_bytes, self._last_checksum = 0, 0
        else:
            self._clear()
        self._inode = status.st_ino

    def _parse(self, file: BinaryIO) -> None:
        file.seek(self._read)
        self._axes.clear()
        for line in file:
            if not line.endswith(b"\n"):
                break  # still being written
            self._last_start, self._checksum_before_last = self._read, self._checksum
            self._last_bytes, self._last_checksum = len(line), zlib.crc32(line)
            self._read += len(line)
            self._checksum = zlib.crc32(line, self._checksum)
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                row = None
            if isinstance(row, dict) and isinstance(row.get("step"), int) and abs(row["step"]) < _STEPS:
                self._add(row)
            else:
                self.damaged += bool(line.strip())
                self._last_start = 0  # it cannot be dropped as a row

    def _add(self, row: dict[str, Any]) -> None:
        number = len(self.steps)
        self.steps.append(row["step"])
        stage = str(row.get("stage") or "")
        if stage not in self.stages:
            self.stages.append(stage)
        self._stage_of.append(self.stages.index(stage))
        for key, value in row.items():
            if (
                isinstance(value, int | float)
                and not isinstance(value, bool)
                and key != "step"
                and abs(value) < _LARGEST
            ):
                column = self._columns.setdefault(key, _Column())
                column.rows.append(number)
                column.values.append(value)

    def _drop_last_row(self) -> None:
        number = len(self.steps) - 1
        self.steps.pop()
        self._stage_of.pop()
        for column in self._columns.values():
            if column.rows and column.rows[-1] == number:
                column.rows.pop()
                column.values.pop()
        self._axes.clear()

    def axis(self, x: XAxis) -> Numbers:
        """Position of every row on an axis, [rows]: its step; tokens trained on, or seconds spent, up to it."""
        if (known := self._axes.get(x)) is None:
            if x == "step":
                known = np.array(self.steps, np.float64)
            else:
                known = np.zeros(len(self.steps))
                for key in ("tokens",) if x == "tokens" else _TIMES:
                    if (column := self._columns.get(key)) is not None:
                        known[np.array(column.rows)] += np.nan_to_num(np.array(column.values))
                known = np.cumsum(known)
            self._axes[x] = known
        return known

    def values(self, key: str, stage: str | None = None) -> tuple[Numbers, Numbers]:
        """Steps and values of a metric, [N] each; empty if there is no such metric."""
        rows, values = self._chosen(key, stage)
        return self.axis("step")[rows], values

    def curve(
        self,
        key: str,
        x: XAxis = "step",
        *,
        points: int = 1000,
        low: float | None = None,
        high: float | None = None,
        stage: str | None = None,
    ) -> Curve:
        """Points of a metric.

        Args:
            points: maximum number; more of them are thinned out to means of as many neighbours each.
            low, high: bounds on the axis; one point beyond each is included, so that lines reach the edges.
            stage: only rows of this stage.
        """
        rows, values = self._chosen(key, stage)
        places = self.axis(x)[rows]
        first = 0 if low is None else max(0, int(np.searchsorted(places, low, "left")) - 1)
        last = len(places) if high is None else int(np.searchsorted(places, high, "right")) + 1
        places, values = places[first:last], values[first:last]
        if len(places) <= points:
            return Curve(places, values, None, None)
        starts = np.linspace(0, len(places), points, endpoint=False).astype(np.int64)
        sizes = np.diff(starts, append=len(places))
        return Curve(
            np.add.reduceat(places, starts) / sizes,
            np.add.reduceat(values, starts) / sizes,
            np.minimum.reduceat(values, starts),
            np.maximum.reduceat(values, starts),
        )

    def _chosen(self, key: str, stage: str | None) -> tuple[npt.NDArray[np.int64], Numbers]:
        column = self._columns.get(key, _Column())
        rows, values = np.array(column.rows, np.int64), np.array(column.values, np.float64)
        if stage is not None and len(rows):
            number = self.stages.index(stage) if stage in self.stages else -1
            chosen = np.array(self._stage_of)[rows] == number
            rows, values = rows[chosen], values[chosen]
        return rows, values


class ColumnCache:
    """Columns of the runs that were looked at last, within a bound of memory. Safe for threads.

    Args:
        most_bytes: bound; the run that is being read is kept in any case.
    """

    def __init__(self, most_bytes: int = _CACHED_BYTES) -> None:
        self._most, self._lock = most_bytes, threading.Lock()
        self._columns: OrderedDict[Path, MetricColumns] = OrderedDict()
        self._locks: dict[Path, threading.Lock] = {}

    def lock(self, run_dir: Path) -> threading.Lock:
        """Lock to hold while the columns of a run are used."""
        with self._lock:
            return self._locks.setdefault(run_dir, threading.Lock())

    def get(self, run_dir: Path) -> MetricColumns:
        """Return the columns of a run, up to date. The caller holds its lock."""
        with self._lock:
            found = self._columns.setdefault(run_dir, MetricColumns(run_dir / METRICS_FILE))
            self._columns.move_to_end(run_dir)
        found.refresh()
        with self._lock:
            while len(self._columns) > 1 and sum(each.bytes for each in self._columns.values()) > self._most:
                self._columns.popitem(last=False)
        return found
