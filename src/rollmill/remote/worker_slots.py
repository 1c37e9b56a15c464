"""Explorers' worker slots in a run: each has a number and stores its state, so that a successor can continue it."""

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
"""Seconds without a heartbeat after which an explorer's groups are no longer counted."""


@dataclass(slots=True)
class WorkerState:
    """An explorer's state in a stage, enough to continue it."""

    unfinished: list[tuple[int, str]] = field(default_factory=list)  #: running groups: number and task
    submitted: int = 0  #: number of tasks started
    tasks: dict[str, Any] | None = None  #: the sampler's state
    pipeline: dict[str, Any] = field(default_factory=dict)  #: the pipeline operators' states


@dataclass(frozen=True, slots=True)
class WorkerSlot:
    """A worker slot held by this process, numbered from 0."""

    run_dir: Path
    number: int

    def load(self, stage: int) -> WorkerState | None:
        """Load the slot's state in a stage; None if it has none."""
        with suppress(FileNotFoundError):
            return _read(self._path(stage))
        return None

    def save(self, stage: int, state: WorkerState) -> None:
        """Save the slot's state in a stage."""
        atomic_write(self._path(stage), (json.dumps(asdict(state)) + "\n").encode())

    def note(self, metrics: dict[str, Any]) -> None:
        """Append to the slot's metrics file."""
        path = self.run_dir / EXPLORERS / f"{self.number}.jsonl"
        with explain_write_errors(path), path.open("a") as file:
            file.write(json.dumps(to_jsonable(metrics), allow_nan=False) + "\n")

    def others(self, stage: int) -> int:
        """Count the running groups of other live explorers. Call it under `run_state_lock`, since it probes locks.

        An explorer silent for SILENT_S counts as dead even if its lock is held: it hangs, or its machine is gone.
        """
        heartbeats = {each.name: each.beat for each in read_heartbeats(self.run_dir)}
        since = time.time() - SILENT_S
        found = 0
        for path in explorers_folder(self.run_dir, stage).glob("*.json"):
            number = int(path.stem)
            alive = heartbeats.get(f"{EXPLORER} {number}", math.inf) > since
            if number != self.number and alive and is_locked(_lock(self.run_dir, number)):
                found += len(_read(path).unfinished)
        return found

    def _path(self, stage: int) -> Path:
        return explorers_folder(self.run_dir, stage) / f"{self.number}.json"


@contextmanager
def acquire_worker_slot(run_dir: Path) -> Iterator[WorkerSlot]:
    """Acquire the first free slot, held inside the context or until the process dies."""
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
