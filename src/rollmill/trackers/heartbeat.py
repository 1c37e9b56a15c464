"""Who works on a run: every process keeps a small file in the run directory that says what it does and awaits."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import psutil

from rollmill.config.yaml_file import read_plain_yaml
from rollmill.errors import ConfigError, RollmillError
from rollmill.files import atomic_write
from rollmill.trackers.metrics_log import read_metrics, read_summary

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


# Who works on a run, and where the run is, read from its directory.

CONFIG = "config.yaml"
LATE_BEATS = 3
"""A process that was silent for more beats is late."""
_RECENT = 5
_SAME_PROCESS_S = 5.0  # a process that began so much later than the first beat has only the same id

ProcessState = Literal["alive", "late", "gone", "ended"]


@dataclass(frozen=True, slots=True)
class RunPosition:
    """Where a run is. Seconds are means of the last steps; None before the first."""

    stage: str
    step: int  #: steps done in the stage
    stage_steps: int
    total: int  #: steps done in the run
    total_steps: int
    seconds_per_step: float | None
    reward: float | None


@dataclass(frozen=True, slots=True)
class RunStatus:
    """What is known of a run. `state` is running, late, done, interrupted, failed, killed, or unknown."""

    state: str
    position: RunPosition
    processes: list[tuple[HeartbeatRecord, ProcessState]]
    now: float  #: seconds since the epoch, when this was read

    @property
    def seconds_left(self) -> float | None:
        """How long the other steps take, if they take as long as the last ones; without evaluations and checkpoints."""
        each, left = self.position.seconds_per_step, self.position.total_steps - self.position.total
        return None if each is None else each * left


def read_status(run_dir: Path) -> RunStatus:
    """The status of a run.

    Raises:
        ConfigError: the folder holds no run.
    """
    config = run_dir / CONFIG
    if not config.is_file():
        raise ConfigError(f"{run_dir} holds no run (no {CONFIG}); give the directory that `rollmill run` printed")
    now = time.time()
    processes = [(beat, process_state(beat, now)) for beat in read_heartbeats(run_dir)]
    position = _position(_planned(read_plain_yaml(config)), read_metrics(run_dir))
    return RunStatus(_run_state(processes, read_summary(run_dir)), position, processes, now)


def process_state(beat: HeartbeatRecord, now: float) -> ProcessState:
    """Whether a process lives: known of this host's at once, of others' by their silence."""
    if beat.ended:
        return "ended"
    if beat.host == socket.gethostname() and not _lives(beat):
        return "gone"
    return "late" if now - beat.beat > LATE_BEATS * HEARTBEAT_INTERVAL_S else "alive"


def _lives(beat: HeartbeatRecord) -> bool:
    try:
        process = psutil.Process(beat.pid)
        return process.status() != psutil.STATUS_ZOMBIE and process.create_time() < beat.began + _SAME_PROCESS_S
    except psutil.NoSuchProcess:
        return False


def _run_state(processes: Sequence[tuple[HeartbeatRecord, ProcessState]], summary: dict[str, Any]) -> str:
    """That of the process that trains: a run goes on without any other, and not without this one."""
    trainer = [(beat, state) for beat, state in processes if beat.name == TRAINER_PROCESS]
    if not trainer:
        return str(summary.get("status", "unknown"))
    [(beat, state)] = trainer
    if state != "ended":
        return {"alive": "running", "late": "late", "gone": "killed"}[state]
    return "failed" if beat.ended.startswith("failed") else str(summary.get("status", beat.ended))


def _planned(config: dict[str, Any]) -> list[tuple[str, int]]:
    """Names and steps of a resolved run file's stages. Raises ConfigError where it is damaged."""
    stages = config.get("stages") or [config | {"name": "train"}]
    try:
        return [(str(stage["name"]), int(stage["steps"])) for stage in stages]
    except (TypeError, KeyError, ValueError) as error:
        raise ConfigError(f"{CONFIG} is damaged: a stage has no name or no number of steps; put it back") from error


def _position(planned: list[tuple[str, int]], rows: list[dict[str, Any]]) -> RunPosition:
    done = [row for row in rows if row.get("seconds/total") is not None]  # others have an evaluation alone
    total_steps = sum(steps for _, steps in planned)
    if not done:
        name, steps = planned[0]
        return RunPosition(name, 0, steps, 0, total_steps, None, None)
    last = done[-1]
    own = [row for row in done if row["stage"] == last["stage"]]
    recent = [row["seconds/total"] for row in own[-_RECENT:]]
    return RunPosition(
        last["stage"],
        len(own),
        dict(planned)[last["stage"]],
        last["step"],
        total_steps,
        statistics.mean(recent),
        last.get("reward/mean"),
    )
