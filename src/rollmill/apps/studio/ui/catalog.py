"""Finds the runs below a folder, and summarises each with little reading. Nothing outside of the folder is read."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rollmill.apps.serve.web import RequestRefusedError
from rollmill.config.yaml_file import read_plain_yaml
from rollmill.errors import ConfigError, RollmillError
from rollmill.trackers.eval_metrics import EVAL_PREFIX, first_accuracy
from rollmill.trackers.event_log import EVENTS_FILE, RESTART, read_events
from rollmill.trackers.heartbeat import CONFIG, planned_stages, process_state, read_heartbeats, run_state
from rollmill.trackers.metrics_log import METRICS_FILE, SUMMARY_FILE, read_summary
from rollmill.trackers.rollout_log import ROLLOUTS_FOLDER
from rollmill.trackers.step_timeline import TIMELINE_FILE

_DEEPEST = 3
_TAIL = 2**21
_RECENT = 5
_SHOWN = (CONFIG, METRICS_FILE, EVENTS_FILE, SUMMARY_FILE, TIMELINE_FILE, ROLLOUTS_FOLDER, "evaluations", "processes")
"""Files and folders of a run whose contents are shown, so that they may not be links to others."""


@dataclass(frozen=True, slots=True)
class RunCard:
    """A run in the table. Times are seconds since the epoch; None where nothing was measured or the file is damaged."""

    id: str  #: its path below the folder; "." is the folder itself
    name: str
    state: str  #: such as running, done or failed, as `RunStatus` has it
    algorithms: list[str]  #: of the stages, in order
    model: str
    stage: str
    step: int
    steps: int | None  #: planned
    reward: float | None
    accuracy: float | None
    seconds_per_step: float | None
    restarts: int
    began: float | None
    updated: float | None
    revision: str  #: changes whenever the metrics do


@dataclass(frozen=True, slots=True)
class _FileFacts:
    """The contents of a run's files, apart from its processes."""

    name: str
    algorithms: list[str]
    model: str
    stage: str
    step: int
    steps: int | None
    reward: float | None
    accuracy: float | None
    seconds_per_step: float | None
    restarts: int


_Signature = tuple[tuple[int, int, int], ...]


class RunCatalog:
    """The runs below `root`, three folders deep. Raises ConfigError if `root` is no folder."""

    def __init__(self, root: Path) -> None:
        if not root.is_dir():
            raise ConfigError(f"{root} is no folder; give a folder of runs, or one run")
        self.root = root.resolve()
        self._known: dict[Path, tuple[_Signature, _FileFacts]] = {}

    def find(self, id: str) -> Path:
        """Return a run's folder. Raises RequestRefusedError for anything that is not a run within the root."""
        try:
            path = (self.root / id).resolve()
            inside = path.is_relative_to(self.root) and _is_run(path)
        except (OSError, ValueError):
            inside = False
        if not inside:
            raise RequestRefusedError(f"there is no run {id[:200]!r} in {self.root}", 404, code="no_run")
        self.check_links(path / name for name in _SHOWN)
        return path

    def check_links(self, paths: Iterable[os.DirEntry[str] | Path]) -> None:
        """Raise RequestRefusedError if one of the paths is a link that leaves the root."""
        for path in paths:
            if path.is_symlink() and not Path(path).resolve().is_relative_to(self.root):
                raise RequestRefusedError(f"{os.fspath(path)} is a link that leaves {self.root}", 403, code="outside")

    def cards(self) -> list[RunCard]:
        """Summarise all runs, the most recently changed first."""
        found = [self.card(path) for path in self.paths()]
        kept = {self.root / card.id for card in found}
        self._known = {path: facts for path, facts in self._known.items() if path in kept or path == self.root}
        return sorted(found, key=lambda card: -(card.updated or 0.0))

    def paths(self) -> list[Path]:
        """Folders of all runs, in the order of their names."""
        return list(self._runs(self.root, 0))

    def card(self, path: Path) -> RunCard:
        """Summarise one run; its files are read again only if they changed."""
        signature = tuple(_signature(path / name) for name in (METRICS_FILE, CONFIG, EVENTS_FILE, SUMMARY_FILE))
        known = self._known.get(path)
        if known is None or known[0] != signature:
            known = signature, _read_facts(path)
            self._known[path] = known
        facts, now = known[1], time.time()
        processes = [(beat, process_state(beat, now)) for beat in read_heartbeats(path)]
        try:
            state = run_state(path, processes, restarted=facts.restarts > 0)
        except RollmillError:  # a damaged summary
            state = "unknown"
        changed = [times[2] / 1e9 for times in signature if times[2]] + [beat.beat for beat, _ in processes]
        began = min((beat.began for beat, _ in processes), default=None)
        return RunCard(
            id=path.relative_to(self.root).as_posix(),
            **asdict(facts),
            state=state,
            began=began,
            updated=max(changed, default=None),
            revision="-".join(map(str, signature[0])),
        )

    def _runs(self, folder: Path, depth: int) -> Iterator[Path]:
        if _is_run(folder):
            with suppress(RequestRefusedError):
                self.check_links(folder / name for name in _SHOWN)
                yield folder
            return
        if depth == _DEEPEST:
            return
        try:
            with os.scandir(folder) as entries:
                inner = sorted(entry.path for entry in entries if entry.is_dir() and not entry.name.startswith("."))
        except OSError:
            return
        for each in inner:
            path = Path(each)
            if not path.is_symlink() or path.resolve().is_relative_to(self.root):
                yield from self._runs(path, depth + 1)


def _is_run(path: Path) -> bool:
    return any((path / name).exists() for name in (METRICS_FILE, ROLLOUTS_FOLDER, CONFIG))


def _signature(path: Path) -> tuple[int, int, int]:
    try:
        status = path.stat()
    except OSError:
        return 0, 0, 0
    return status.st_ino, status.st_size, status.st_mtime_ns


def _read_facts(path: Path) -> _FileFacts:
    config = read_config(path)
    rows = read_last_rows(path / METRICS_FILE, beyond=_RECENT, having=EVAL_PREFIX)
    done = [row for row in rows if row.get("seconds/total") is not None]
    last = done[-1] if done else rows[-1] if rows else {}
    seconds = [row["seconds/total"] for row in done[-_RECENT:] if isinstance(row["seconds/total"], int | float)]
    accuracies = [found for row in rows if (found := first_accuracy(row)) is not None]
    try:
        planned = sum(steps for _, steps in planned_stages(config))
    except RollmillError:
        planned = None
    try:
        summary = read_summary(path)
    except RollmillError:
        summary = {}
    final = summary.get("accuracy_after")
    return _FileFacts(
        name=str(config.get("name") or path.name),
        algorithms=_algorithms(config),
        model=str(_section(config, "model").get("path") or ""),
        stage=str(last.get("stage") or ""),
        step=int(last["step"]) if isinstance(last.get("step"), int) else 0,
        steps=planned,
        reward=_number(last.get("reward/mean")),
        accuracy=accuracies[-1] if accuracies else _number(final),
        seconds_per_step=sum(seconds) / len(seconds) if seconds else None,
        restarts=len(read_events(path, RESTART)),
    )


def read_config(run_dir: Path) -> dict[str, Any]:
    """Read a run's resolved run file; empty if there is none or it is damaged."""
    try:
        found = read_plain_yaml(run_dir / CONFIG)
    except (RollmillError, OSError):
        return {}
    return found if isinstance(found, dict) else {}


def read_last_rows(path: Path, *, beyond: int | None = None, having: str = "") -> list[dict[str, Any]]:
    """Read the rows in the last 2 MiB of a JSONL file; damaged and incomplete ones are left out.

    Args:
        beyond: of the rows before the last `beyond` ones, read only those with the text `having`, which is quick.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL))
            lines = file.read().split(b"\n")
    except OSError:
        return []
    rows, wanted = [], having.encode()
    lines = lines[1:] if size > _TAIL else lines
    certain = 0 if beyond is None else len(lines) - beyond - 1  # the last line is empty, or torn
    for number, line in enumerate(lines):
        if number < certain and wanted not in line:
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows


def _algorithms(config: dict[str, Any]) -> list[str]:
    stages = config.get("stages") or [config]
    sections = [stage for stage in stages if isinstance(stage, dict)] if isinstance(stages, list) else []
    names = [(_section(stage, "algorithm") or _section(config, "algorithm")).get("name") for stage in sections]
    return [str(name) for name in names if name]


def _section(config: dict[str, Any], name: str) -> dict[str, Any]:
    found = config.get(name)
    return found if isinstance(found, dict) else {}


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
