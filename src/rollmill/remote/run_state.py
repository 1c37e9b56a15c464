"""State that the trainer and the explorer processes of a run share in the run directory.

RUN/trainer.json                the trainer's address and key, and whether the run is done
RUN/explorers/0.lock            held by explorer 0 while it runs
RUN/weights/                    the newest weights
RUN/processes/trainer.json      the trainer's heartbeat (trackers/heartbeat.py)
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from rollmill.errors import ConfigError, DeadlineError
from rollmill.files import atomic_write, try_lock
from rollmill.trackers.heartbeat import TRAINER_PROCESS, HeartbeatRecord, process_state, read_heartbeats

TRAINER_STATUS, EXPLORERS, WEIGHTS = "trainer.json", "explorers", "weights"
EXPLORER = "explorer"
"""Names of processes; an explorer's is followed by its number."""
_LOOK_S = 0.5


@dataclass(frozen=True, slots=True)
class TrainerStatus:
    """The running trainer, as explorers find it."""

    run_id: str
    host: str = ""  #: its name
    addresses: tuple[str, ...] = ()  #: of its host, for explorers on others
    port: int = 0
    key: str = ""  #: hexadecimal; who knows it may join
    done: bool = False  #: the run is done

    def write(self, run_dir: Path) -> None:
        """Write the status; only this user may read it."""
        atomic_write(run_dir / TRAINER_STATUS, (json.dumps(asdict(self)) + "\n").encode(), private=True)


def read_trainer_status(run_dir: Path) -> TrainerStatus | None:
    """Read the trainer's status; None before the first.

    Raises ConfigError if it belongs to another user, or to another version of rollmill.
    """
    path = run_dir / TRAINER_STATUS
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except ValueError:  # empty after a power failure; a trainer that starts writes it again
        return None
    except PermissionError:
        raise ConfigError(f"{path} belongs to another user; start explorers as the user of the trainer") from None
    try:
        return TrainerStatus(**found | {"addresses": tuple(found["addresses"])})
    except (TypeError, KeyError) as error:
        advice = "use the same version for trainer and explorers, and start the trainer first"
        raise ConfigError(f"{path} was written by another version of rollmill; {advice}") from error


@contextmanager
def acquire_worker_number(run_dir: Path) -> Iterator[int]:
    """Acquire the first free number of an explorer, held inside the context or until the process dies."""
    folder = run_dir / EXPLORERS
    folder.mkdir(parents=True, exist_ok=True)
    number = 0
    while (lock := try_lock(folder / f"{number}.lock")) is None:
        number += 1
    with lock:
        yield number


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
    if process_state(beat, time.time()) == "stopped":
        return f"{who} is stopped; `kill -CONT {beat.pid}` continues it"
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
        if process_state(trainer, time.time()) == "stopped":
            return DeadlineError(
                self._who, who, self._away_s, f"It is stopped; `kill -CONT {trainer.pid}` continues it. {wait}"
            )
        ended = f"It ended: {trainer.ended}. " if trainer.ended else ""
        advice = f"{ended}Go on with it by `rollmill resume {self._run_dir}`, and start this explorer again. {wait}"
        return DeadlineError(self._who, who, self._away_s, advice)

    def _trainer(self) -> HeartbeatRecord | None:
        found = [each for each in read_heartbeats(self._run_dir) if each.name == TRAINER_PROCESS]
        return found[0] if found else None
