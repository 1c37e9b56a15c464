"""Who works on a run: every process keeps a small file in the run directory that says what it does and awaits."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rollmill.errors import RollmillError
from rollmill.files import atomic_write

HEARTBEAT_FOLDER, TRAINER_PROCESS = "processes", "trainer"
HEARTBEAT_INTERVAL_S = 2.0


@dataclass(frozen=True, slots=True)
class HeartbeatRecord:
    """What a process last said. Times are seconds since the epoch."""

    name: str  #: such as `trainer` or `explorer 0`; one process of a run at a time has it
    host: str
    pid: int
    began: float
    beat: float
    doing: str  #: such as `train, step 12`
    waits_for: str = ""  #: such as `4 groups of explorers`; nothing while it computes
    since: float = 0.0  #: when it began to do, or wait for, that
    version: int = -1  #: of the weights it has
    ended: str = ""  #: how it ended, if it did: `done`, `interrupted`, or an error


class HeartbeatWriter:
    """Says every two seconds that this process lives, from a thread of its own, and at once what has changed.

    A process that is killed says nothing more: who reads its file sees an old `beat`. What cannot be written is left
    out: only `rollmill status`, and explorers that wait for a trainer in another process, depend on it.
    """

    def __init__(self, run_dir: Path, name: str) -> None:
        now = time.time()
        self._path = run_dir / HEARTBEAT_FOLDER / f"{name.replace(' ', '-')}.json"
        self._now = HeartbeatRecord(name, socket.gethostname(), os.getpid(), now, now, "start", since=now)
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._write()
        self._thread = threading.Thread(target=self._keep_beating, name="heartbeat", daemon=True)
        self._thread.start()

    def set_activity(self, doing: str, waits_for: str = "", *, version: int | None = None) -> None:
        """What the process does from now on, and what it waits for."""
        with self._lock:
            before = self._now
            since = before.since if (doing, waits_for) == (before.doing, before.waits_for) else time.time()
            version = before.version if version is None else version
            self._now = replace(before, doing=doing, waits_for=waits_for, since=since, version=version)
        if self._now != before:
            self._write()

    def close(self, ended: str) -> None:
        """The last beat: how the process ended. May be called twice; the first call counts."""
        if self._ended.is_set():
            return
        self._ended.set()
        self._thread.join()
        with self._lock:
            self._now = replace(self._now, ended=ended, waits_for="")
        self._write()

    def _keep_beating(self) -> None:
        while not self._ended.wait(HEARTBEAT_INTERVAL_S):
            self._write()

    def _write(self) -> None:
        with self._lock:
            self._now = replace(self._now, beat=time.time())
            text = json.dumps(asdict(self._now)) + "\n"
            try:
                atomic_write(self._path, text.encode())
            except RollmillError:
                return


@contextmanager
def keep_heartbeat(run_dir: Path, name: str) -> Iterator[HeartbeatWriter]:
    """A process that says what it does inside, and how that ended."""
    heartbeat = HeartbeatWriter(run_dir, name)
    try:
        yield heartbeat
    except (KeyboardInterrupt, asyncio.CancelledError):
        heartbeat.close("interrupted")
        raise
    except BaseException as error:
        heartbeat.close(f"failed: {str(error) or type(error).__name__}")
        raise
    heartbeat.close("done")


def read_heartbeats(run_dir: Path) -> list[HeartbeatRecord]:
    """What the processes of a run last said, by name; files that are no beats are left out."""
    found = []
    for path in sorted((run_dir / HEARTBEAT_FOLDER).glob("*.json")):
        try:
            found.append(HeartbeatRecord(**json.loads(path.read_text())))
        except (OSError, ValueError, TypeError, RecursionError):
            continue
    return found
