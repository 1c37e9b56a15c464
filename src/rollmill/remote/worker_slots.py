"""Explorers' places in a run: each has a number of its own, says what it has under way, and goes on after its death."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rollmill.files import atomic_write, explain_write_errors, to_jsonable
from rollmill.remote.run_state import EXPLORER, EXPLORERS, explorers_folder, is_locked, run_state_lock, try_lock
from rollmill.trackers.heartbeat import read_heartbeats

SILENT_S = 30.0
"""After how many seconds without a sign of life an explorer's groups are no longer waited for."""


@dataclass(slots=True)
class WorkerState:
    """Where an explorer is in a stage: enough to go on there."""

    unfinished: list[tuple[int, str]] = field(default_factory=list)  #: groups under way: number and task
    submitted: int = 0  #: tasks that were started
    tasks: dict[str, Any] | None = None  #: the sampler's state
    pipeline: dict[str, Any] = field(default_factory=dict)  #: what its operators remember


@dataclass(frozen=True, slots=True)
class WorkerSlot:
    """A place that this process has, from 0."""

    run_dir: Path
    number: int

    def doing(self, stage: int) -> WorkerState | None:
        """What this place said last in a stage; None where it has not been there."""
        with suppress(FileNotFoundError):
            return _read(self._path(stage))
        return None

    def say(self, stage: int, doing: WorkerState) -> None:
        """Say what this explorer is doing from now on."""
        atomic_write(self._path(stage), (json.dumps(asdict(doing)) + "\n").encode())

    def note(self, metrics: dict[str, Any]) -> None:
        """Add a line to this place's metrics."""
        path = self.run_dir / EXPLORERS / f"{self.number}.jsonl"
        with explain_write_errors(path), path.open("a") as file:
            file.write(json.dumps(to_jsonable(metrics), allow_nan=False) + "\n")

    def others(self, stage: int) -> int:
        """How many groups other explorers that live say they have under way. Within `turn`, since it looks at locks.

        One that has been silent for SILENT_S counts as dead, though its lock is held: it hangs, or its machine is gone.
        """
        heard = {each.name: each.beat for each in read_heartbeats(self.run_dir)}
        since = time.time() - SILENT_S
        found = 0
        for path in explorers_folder(self.run_dir, stage).glob("*.json"):
            number = int(path.stem)
            speaks = heard.get(f"{EXPLORER} {number}", math.inf) > since
            if number != self.number and speaks and is_locked(_lock(self.run_dir, number)):
                found += len(_read(path).unfinished)
        return found

    def _path(self, stage: int) -> Path:
        return explorers_folder(self.run_dir, stage) / f"{self.number}.json"


@contextmanager
def acquire_worker_slot(run_dir: Path) -> Iterator[WorkerSlot]:
    """The first place that is free; this process has it inside, or until it dies."""
    with run_state_lock(run_dir):
        number = 0
        while (lock := try_lock(_lock(run_dir, number))) is None:
            number += 1
    with lock:
        yield WorkerSlot(run_dir, number)


def _lock(run_dir: Path, number: int) -> Path:
    return run_dir / EXPLORERS / f"{number}.lock"


def _read(path: Path) -> WorkerState:
    known = json.loads(path.read_text())
    return WorkerState(**known | {"unfinished": [(number, task) for number, task in known["unfinished"]]})
