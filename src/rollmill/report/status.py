"""Who works on a run, and where the run is, read from its directory."""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil

from rollmill.config.yaml_file import read_plain_yaml
from rollmill.errors import ConfigError
from rollmill.trackers.heartbeat import HEARTBEAT_INTERVAL_S, TRAINER_PROCESS, HeartbeatRecord, read_heartbeats
from rollmill.trackers.metrics_log import read_metrics
from rollmill.trackers.summary import read_summary

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
