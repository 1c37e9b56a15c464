"""Heartbeats of a run's processes, and the status of a run read from its directory.

Every process keeps a small file in the run directory with its current activity.
"""

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
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import psutil

from rollmill.config.yaml_file import read_plain_yaml
from rollmill.errors import ConfigError, RollmillError
from rollmill.files import atomic_write, is_locked
from rollmill.trackers.activity_log import Activity, ActivityLog
from rollmill.trackers.domains import DomainProgress, DomainState
from rollmill.trackers.event_log import RESTART, SCALE, read_events
from rollmill.trackers.metrics_log import read_metrics, read_summary
from rollmill.waiting import OUTAGES

HEARTBEAT_FOLDER, TRAINER_PROCESS = "processes", "trainer"
HEARTBEAT_INTERVAL_S = 2.0


@dataclass(frozen=True, slots=True)
class HeartbeatRecord:
    """Last heartbeat of a process. Times are seconds since the epoch."""

    name: str  #: such as `trainer` or `explorer 0`; unique in the run
    host: str
    pid: int
    began: float
    beat: float
    doing: str  #: such as `train, step 12`
    waits_for: str = ""  #: such as `4 groups of explorers`, or an endpoint that is unreachable; empty while it computes
    since: float = 0.0  #: start of the activity or of the wait
    version: int = -1  #: version of its weights
    started: int = 0  #: clock ticks from the host's boot to the process's start, which no set clock changes; 0: unknown
    ended: str = ""  #: `done`, `interrupted`, or an error; empty while it runs


class HeartbeatWriter:
    """Writes a heartbeat every two seconds from a thread, and immediately when the activity changes.

    The file of a killed process has an old `beat`. Write errors are ignored, because only `rollmill status`, and
    trainer and explorers that wait for each other, depend on the file.
    """

    def __init__(self, run_dir: Path, name: str) -> None:
        now = time.time()
        self._path = _heartbeat_path(run_dir, name)
        host, pid = socket.gethostname(), os.getpid()
        self._now = HeartbeatRecord(name, host, pid, now, now, "start", since=now, started=_start_ticks(pid))
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._write()
        self._log = ActivityLog(activity_file(run_dir, name))
        self._log.add(Activity(now, "start"))
        self._thread = threading.Thread(target=self._keep_beating, name="heartbeat", daemon=True)
        self._thread.start()

    def set_activity(self, doing: str, waits_for: str = "", *, version: int | None = None) -> None:
        """Set the current activity, and what the process waits for."""
        with self._lock:
            before = self._now
            since = before.since if (doing, waits_for) == (before.doing, before.waits_for) else time.time()
            version = before.version if version is None else version
            self._now = replace(before, doing=doing, waits_for=waits_for, since=since, version=version)
            self._log.add(Activity(time.time(), doing, waits_for, version))
        if self._now != before:
            self._write()

    def close(self, ended: str) -> None:
        """Write the last heartbeat, with the way the process ended. Only the first call has an effect."""
        if self._ended.is_set():
            return
        self._ended.set()
        self._thread.join()
        with self._lock:
            self._now = replace(self._now, ended=ended, waits_for="")
            self._log.add(Activity(time.time(), ""))
        self._write()

    def _keep_beating(self) -> None:
        while not self._ended.wait(HEARTBEAT_INTERVAL_S):
            self._write()

    def _write(self) -> None:
        with self._lock:
            self._now = replace(self._now, beat=time.time())
            outages = "" if self._ended.is_set() else OUTAGES.describe()
            text = json.dumps(asdict(self._now) | ({"waits_for": outages} if outages else {})) + "\n"
            try:
                atomic_write(self._path, text.encode())
            except RollmillError:
                return


@contextmanager
def keep_heartbeat(run_dir: Path, name: str) -> Iterator[HeartbeatWriter]:
    """Write heartbeats during the body, and how it ended."""
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
    """Read the last heartbeats of a run's processes, by name; skips invalid files."""
    found = []
    for path in sorted((run_dir / HEARTBEAT_FOLDER).glob("*.json")):
        try:
            found.append(HeartbeatRecord(**json.loads(path.read_text())))
        except (OSError, ValueError, TypeError, RecursionError):
            continue
    return found


def read_beat(run_dir: Path, name: str) -> float | None:
    """Time of a process's last heartbeat, by its own clock; None if there is none to read."""
    try:
        return float(json.loads(_heartbeat_path(run_dir, name).read_text())["beat"])
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _heartbeat_path(run_dir: Path, name: str) -> Path:
    return run_dir / HEARTBEAT_FOLDER / f"{name.replace(' ', '-')}.json"


def activity_file(run_dir: Path, name: str) -> Path:
    """The file with what a process did, see `ActivityLog`."""
    return _heartbeat_path(run_dir, name).with_suffix(".jsonl")


def trainer_activity(run_dir: Path) -> str:
    """The last activity of the process that trains, whether it lives or not; empty before the first."""
    return next((beat.doing for beat in read_heartbeats(run_dir) if beat.name == TRAINER_PROCESS), "")


# Status of a run

CONFIG, _RUN_LOCK = "config.yaml", "run.lock"
LATE_BEATS = 3
"""Number of missed heartbeats after which a process is late."""
_RECENT = 5
_SAME_PROCESS_S = (
    5.0  # a process that started this much later than the first heartbeat is another one with the same pid
)

ProcessState = Literal["alive", "late", "stopped", "gone", "ended"]


@dataclass(frozen=True, slots=True)
class RunPosition:
    """Progress of a run. Seconds are means of the last steps; None before the first."""

    stage: str
    step: int  #: steps done in the stage
    stage_steps: int
    total: int  #: steps done in the run
    total_steps: int
    seconds_per_step: float | None
    reward: float | None


@dataclass(frozen=True, slots=True)
class RunStatus:
    """Status of a run. `state` is running, restarting, late, stopped, done, interrupted, failed, killed, or unknown."""

    state: str
    position: RunPosition
    processes: list[tuple[HeartbeatRecord, ProcessState]]
    now: float  #: seconds since the epoch, when this was read
    restarts: list[dict[str, Any]] = field(default_factory=list)  #: events of restarts
    domains: list[DomainState] = field(default_factory=list)  #: those of the stage
    scalings: list[dict[str, Any]] = field(default_factory=list)  #: events of `rollmill scale`

    @property
    def seconds_left(self) -> float | None:
        """Seconds for the remaining steps at the speed of the last ones, without evaluations and checkpoints."""
        each, left = self.position.seconds_per_step, self.position.total_steps - self.position.total
        return None if each is None else each * left


def read_status(run_dir: Path) -> RunStatus:
    """Read the status of a run.

    Raises:
        ConfigError: the folder holds no run.
    """
    config = run_dir / CONFIG
    if not config.is_file():
        raise ConfigError(f"{run_dir} holds no run (no {CONFIG}); give the directory that `rollmill run` printed")
    now = time.time()
    processes = [(beat, process_state(beat, now)) for beat in read_heartbeats(run_dir)]
    rows = read_metrics(run_dir)
    position = _position(planned_stages(read_plain_yaml(config)), rows)
    restarts, scalings = read_events(run_dir, RESTART), read_events(run_dir, SCALE)
    state = run_state(run_dir, processes, restarted=bool(restarts))
    return RunStatus(state, position, processes, now, restarts, DomainProgress(rows).states, scalings)


def run_state(run_dir: Path, processes: Sequence[tuple[HeartbeatRecord, ProcessState]], *, restarted: bool) -> str:
    """State of a run, see RunStatus.

    Args:
        processes: its processes, from `read_heartbeats` and `process_state`.
        restarted: whether the process that trains was ever started again.
    """
    state = _training_state(processes, read_summary(run_dir))
    if state in ("killed", "failed") and restarted and is_locked(run_dir / _RUN_LOCK):
        return "restarting"  # the supervisor has the lock while it waits
    return state


def process_state(beat: HeartbeatRecord, now: float) -> ProcessState:
    """State of a process: on this host by its pid, on others by the age of its heartbeat."""
    if beat.ended:
        return "ended"
    if beat.host == socket.gethostname() and (found := _state_here(beat)) != "alive":
        return found
    return "late" if now - beat.beat > LATE_BEATS * HEARTBEAT_INTERVAL_S else "alive"


def _state_here(beat: HeartbeatRecord) -> ProcessState:
    try:
        process = psutil.Process(beat.pid)
        status, same = process.status(), process.create_time() < beat.began + _SAME_PROCESS_S
        if beat.started and (ticks := _start_ticks(beat.pid)):
            same = ticks == beat.started
    except psutil.NoSuchProcess:
        return "gone"
    if status == psutil.STATUS_ZOMBIE or not same:
        return "gone"
    return "stopped" if status == psutil.STATUS_STOPPED else "alive"


def _start_ticks(pid: int) -> int:
    """Return `started` of a process of this host."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:  # it has just ended, or this system has no such file
        return 0


def _training_state(processes: Sequence[tuple[HeartbeatRecord, ProcessState]], summary: dict[str, Any]) -> str:
    """State of the run: that of the trainer process, the only one that a run cannot continue without."""
    trainer = [(beat, state) for beat, state in processes if beat.name == TRAINER_PROCESS]
    if not trainer:
        return str(summary.get("status", "unknown"))
    [(beat, state)] = trainer
    if state != "ended":
        return {"alive": "running", "late": "late", "stopped": "stopped", "gone": "killed"}[state]
    return "failed" if beat.ended.startswith("failed") else str(summary.get("status", beat.ended))


def planned_stages(config: dict[str, Any]) -> list[tuple[str, int]]:
    """Names and steps of a resolved run file's stages. Raises ConfigError if it is damaged."""
    stages = config.get("stages") or [config | {"name": "train"}]
    try:
        return [(str(stage["name"]), int(stage["steps"])) for stage in stages]
    except (TypeError, KeyError, ValueError) as error:
        raise ConfigError(f"{CONFIG} is damaged: a stage has no name or no number of steps; put it back") from error


def _position(planned: list[tuple[str, int]], rows: list[dict[str, Any]]) -> RunPosition:
    done = [row for row in rows if row.get("seconds/total") is not None]  # other rows have only an evaluation
    total_steps = sum(steps for _, steps in planned)
    if not done:
        name, steps = planned[0]
        return RunPosition(name, 0, steps, 0, total_steps, None, None)
    last = done[-1]
    stage = [row for row in done if row["stage"] == last["stage"]]
    recent = [row["seconds/total"] for row in stage[-_RECENT:]]
    return RunPosition(
        last["stage"],
        len(stage),
        dict(planned)[last["stage"]],
        last["step"],
        total_steps,
        statistics.mean(recent),
        last.get("reward/mean"),
    )
