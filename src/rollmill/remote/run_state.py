"""State that the trainer and the explorer processes of a run share in the run directory.

RUN/trainer.json                the trainer's current stage
RUN/weights/stage-0/            its weights, version by version
RUN/explorers/                  the explorers' worker slots, and each one's state in a stage
RUN/asked/                      evaluation requests of the trainer, and their results
RUN/processes/trainer.json      its heartbeat (trackers/heartbeat.py)
"""

from __future__ import annotations

import fcntl
import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from rollmill.errors import DeadlineError
from rollmill.files import atomic_write
from rollmill.trackers.heartbeat import TRAINER_PROCESS, HeartbeatRecord, read_heartbeats

TRAINER_STATUS, EXPLORERS, WEIGHTS, EVALUATION_REQUESTS = "trainer.json", "explorers", "weights", "asked"
EXPLORER = "explorer"
"""Names of processes; an explorer's is followed by its number."""
_LOCK = "lock"
_LOOK_S = 0.5


@dataclass(frozen=True, slots=True)
class TrainerStatus:
    """The trainer's position in the run."""

    run_id: str
    stage: int
    first_version: int  #: version of the weights at the start of the stage
    done: bool = False  #: the run is done

    def write(self, run_dir: Path) -> None:
        """Write the status. Afterwards no explorer puts groups of another stage into the buffer."""
        with run_state_lock(run_dir):
            atomic_write(run_dir / TRAINER_STATUS, (json.dumps(asdict(self)) + "\n").encode())


def read_trainer_status(run_dir: Path) -> TrainerStatus | None:
    """Read the trainer's status; None before the first."""
    try:
        return TrainerStatus(**json.loads((run_dir / TRAINER_STATUS).read_text()))
    except FileNotFoundError:
        return None


@contextmanager
def run_state_lock(run_dir: Path) -> Iterator[None]:
    """Lock the run's shared state: processes admit rollouts, put groups and change stages one at a time."""
    folder = run_dir / EXPLORERS
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / _LOCK).open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # gone with the process
        yield


def weights_folder(run_dir: Path, stage: int) -> Path:
    """Folder of a stage's weights."""
    return run_dir / WEIGHTS / f"stage-{stage}"


def explorers_folder(run_dir: Path, stage: int) -> Path:
    """Folder of the explorers' states in a stage."""
    return run_dir / EXPLORERS / f"stage-{stage}"


def remove_run_state(run_dir: Path) -> None:
    """Remove the state of another run in this directory, which ended before its first result."""
    with run_state_lock(run_dir):
        for left in (run_dir / TRAINER_STATUS, *(run_dir / EXPLORERS).glob("*.jsonl")):
            left.unlink(missing_ok=True)
        _remove(run_dir / WEIGHTS, run_dir / EVALUATION_REQUESTS, *(run_dir / EXPLORERS).glob("stage-*"))


def remove_finished_stages(run_dir: Path, stage: int) -> None:
    """Remove old evaluation requests, and weights of stages before the last."""
    _remove(run_dir / EVALUATION_REQUESTS, *(weights_folder(run_dir, each) for each in range(stage - 1)))


def _remove(*folders: Path) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def describe_explorers(run_dir: Path) -> str:
    """Describe the explorers that have ever joined a run and their last reports, as part of an error."""
    known = [each for each in read_heartbeats(run_dir) if each.name.startswith(f"{EXPLORER} ")]
    how = f"start one: rollmill run {run_dir}/config.yaml --set mode=explore --out {run_dir}"
    if not known:
        return f"No explorer has joined; {how}."
    return f"{'; '.join(map(_describe_heartbeat, known))}. Look at those, or {how}."


def _describe_heartbeat(beat: HeartbeatRecord) -> str:
    who = f"{beat.name} (process {beat.pid} on {beat.host})"
    if beat.ended:
        return f"{who} has ended: {beat.ended}"
    waits = f", waits for {beat.waits_for}" if beat.waits_for else ""
    return f"{who} said {max(0.0, time.time() - beat.beat):.0f} s ago: {beat.doing}{waits}"


class TrainerWatch:
    """Checks the trainer's heartbeat, for an explorer.

    Args:
        away_s: how long the trainer may be silent, while it is started or resumed.
    """

    def __init__(self, run_dir: Path, who: str, away_s: float) -> None:
        self._run_dir, self._who, self._away_s = run_dir, who, away_s
        self._heard: float | None = None  # its beat, by the clock of its machine
        self._since, self._looked = time.monotonic(), 0.0

    def check(self) -> None:
        """Raise DeadlineError if it has been silent for too long."""
        if time.monotonic() - self._looked < _LOOK_S:
            return
        self._looked = time.monotonic()
        trainer = self._trainer()
        if trainer is not None and not trainer.ended and trainer.beat != self._heard:
            self._heard, self._since = trainer.beat, time.monotonic()
        elif time.monotonic() - self._since > self._away_s:
            raise self._gone(trainer)

    def _gone(self, trainer: HeartbeatRecord | None) -> DeadlineError:
        wait = "Raise trainer_away_s where that takes longer."
        if trainer is None:
            advice = f"Start it by `rollmill run FILE --set mode=train --out {self._run_dir}`. {wait}"
            return DeadlineError(self._who, f"the trainer of {self._run_dir}", self._away_s, advice)
        who = f"the trainer (process {trainer.pid} on {trainer.host})"
        ended = f"It ended: {trainer.ended}. " if trainer.ended else ""
        advice = f"{ended}Go on with it by `rollmill resume {self._run_dir}`, and start this explorer again. {wait}"
        return DeadlineError(self._who, who, self._away_s, advice)

    def _trainer(self) -> HeartbeatRecord | None:
        found = [each for each in read_heartbeats(self._run_dir) if each.name == TRAINER_PROCESS]
        return found[0] if found else None


def try_lock(path: Path) -> IO[str] | None:
    """The file, locked until it is closed or the process ends; None if another process has locked it."""
    file = path.open("a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file


def is_locked(path: Path) -> bool:
    """True if some process holds the lock."""
    with suppress(FileNotFoundError, NotADirectoryError), path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
