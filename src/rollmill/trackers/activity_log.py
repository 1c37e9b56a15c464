"""History of what each process of a run did and waited for: RUN/processes/NAME.jsonl, beside its heartbeats.

Written by the process itself, a line whenever its activity changes. Nothing depends on it but pages that show it, so
write errors are ignored, and of a file that has become large only the newer half is kept.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollmill.errors import RollmillError
from rollmill.files import atomic_write

MOST_BYTES = 1 << 20
"""Size at which a file loses its older half; about ten thousand changes."""
_NUMBERS = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class Activity:
    """Activity of a process from `time` on, in seconds since the epoch, until the next line."""

    time: float
    doing: str  #: such as `train, step 12 of 40, stage main`; empty once it has ended
    waits_for: str = ""
    version: int = -1  #: version of its weights

    @property
    def kind(self) -> str:
        """The activity without its details, such as `train`."""
        return self.doing.partition(",")[0]


class ActivityLog:
    """Appends to the file of one process. Changes of numbers in `waits_for` alone are left out."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._last: tuple[str, str, int] | None = None

    def add(self, activity: Activity) -> None:
        """Append an activity, unless it is the last one."""
        key = activity.doing, _NUMBERS.sub("", activity.waits_for), activity.version
        if key == self._last:
            return
        self._last = key
        line = [round(activity.time, 3), activity.doing, activity.waits_for, activity.version]
        try:
            with self._path.open("ab") as file:  # anew each time, since somebody may remove the folder
                file.write(json.dumps(line).encode() + b"\n")
                large = file.tell() > MOST_BYTES
            if large:
                kept = self._path.read_bytes()[-MOST_BYTES // 2 :]
                atomic_write(self._path, kept[kept.index(b"\n") + 1 :])
        except (OSError, RollmillError, ValueError):
            return


def read_activities(path: Path) -> list[Activity]:
    """Read a file in order; damaged lines, and one that is being written, are left out. A missing file is empty."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError:
        return []
    return list(_parsed(lines))


def _parsed(lines: list[bytes]) -> Iterator[Activity]:
    for line in lines:
        try:
            row: Any = json.loads(line)
            time, doing, waits_for, version = row
        except (ValueError, TypeError, RecursionError):
            continue
        kinds = (time, int | float), (doing, str), (waits_for, str), (version, int)
        if all(isinstance(value, kind) for value, kind in kinds):
            yield Activity(float(time), doing, waits_for, version)
