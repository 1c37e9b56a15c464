"""Explorers' places in a run: each has a number of its own, says what it has under way, and goes on after its death."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rollmill.master.notices import EXPLORERS, explorers_folder, is_held, locked, turn
from rollmill.monitor.files import atomic_write, plain, writing


@dataclass(slots=True)
class Doing:
    """Where an explorer is in a stage: enough to go on there."""

    unfinished: list[tuple[int, str]] = field(default_factory=list)  #: groups under way: number and task
    submitted: int = 0  #: tasks that were started
    tasks: dict[str, Any] | None = None  #: the sampler's state
    pipeline: dict[str, Any] = field(default_factory=dict)  #: what its operators remember


@dataclass(frozen=True, slots=True)
class Place:
    """A place that this process has, from 0."""

    run_dir: Path
    number: int

    def doing(self, stage: int) -> Doing | None:
        """What this place said last in a stage; None where it has not been there."""
        return _read(self._path(stage))

    def say(self, stage: int, doing: Doing) -> None:
        """Say what this explorer is doing from now on."""
        atomic_write(self._path(stage), (json.dumps(asdict(doing)) + "\n").encode())

    def note(self, metrics: dict[str, Any]) -> None:
        """Add a line to this place's metrics."""
        path = self.run_dir / EXPLORERS / f"{self.number}.jsonl"
        with writing(path), path.open("a") as file:
            file.write(json.dumps(plain(metrics), allow_nan=False) + "\n")

    def others(self, stage: int) -> int:
        """How many groups other explorers that live say they have under way. Within `turn`, since it looks at locks."""
        known = [(path, int(path.stem)) for path in explorers_folder(self.run_dir, stage).glob("*.json")]
        alive = [path for path, number in known if number != self.number and is_held(_lock(self.run_dir, number))]
        return sum(len(found.unfinished) for path in alive if (found := _read(path)) is not None)

    def _path(self, stage: int) -> Path:
        return explorers_folder(self.run_dir, stage) / f"{self.number}.json"


@contextmanager
def place(run_dir: Path) -> Iterator[Place]:
    """The first place that is free; this process has it inside, or until it dies."""
    with turn(run_dir):
        number = 0
        while (lock := locked(_lock(run_dir, number))) is None:
            number += 1
    with lock:
        yield Place(run_dir, number)


def _lock(run_dir: Path, number: int) -> Path:
    return run_dir / EXPLORERS / f"{number}.lock"


def _read(path: Path) -> Doing | None:
    try:
        known = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    return Doing(**known | {"unfinished": [(number, task) for number, task in known["unfinished"]]})
