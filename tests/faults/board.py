"""The faults of the board, how one is run, and what is expected of its end."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest
from support.forks import Ended
from support.tiny import outcome

from faults.scene import GROUPS, MODES, SIZE, STEPS, CannotRunError, Scene, Services
from rollmill.buffer import ExperienceKind, open_run_store

LEVELS = ("incomplete", "complete", "same rollouts", "bit-equal")
"""How much a recovered run has in common with an undisturbed one, from nothing to everything."""
LOSSES = {"rel": 1e-4, "abs": 1e-6}


@dataclass(frozen=True)
class Fault:
    """A fault in one mode.

    `promise` is `recovered`, or `diagnosed`: an exit code of 1 (or `code`), within `deadline_s` of the fault, with a
    message that holds `names`. A recovered run says `names` where its first try failed.
    """

    name: str
    family: str
    mode: str
    store: str
    body: Callable[[Scene], None]
    promise: str = "recovered"
    names: tuple[str, ...] = ()
    deadline_s: float = 120.0
    code: int = 1
    level: str = ""  #: of the comparison; default: what the mode promises
    max_tries: int = 4

    @property
    def place(self) -> str:
        """MODE/STORE."""
        return f"{self.mode}/{self.store}"


@dataclass
class Row:
    """What was seen of a fault. `outcome` is skipped, recovered, diagnosed or FAILED."""

    fault: str
    family: str
    mode: str
    store: str
    promise: str
    outcome: str = "FAILED"
    level: str = ""  #: of a recovered run, see LEVELS
    tries: int = 0  #: starts of the command: 1 where the run was not resumed by hand
    lost: int = 0
    doubled: int = 0
    seconds_to_recovery: float | None = None  #: from the fault to the next step, or to the diagnosis
    message: str = ""
    wrong: list[str] = field(default_factory=list)  #: what was not as promised
    commit: str = ""  #: of the source that ran


FAULTS: list[Fault] = []


def fault(name: str, *places: str, **expected: Any) -> Callable[[Callable[[Scene], None]], Callable[[Scene], None]]:
    """Put a fault on the board, in several places MODE/STORE. See Fault for what is expected."""

    def put(body: Callable[[Scene], None]) -> Callable[[Scene], None]:
        family = body.__module__.rpartition(".")[2]
        for place in places:
            mode, store = place.split("/")
            FAULTS.append(Fault(name, family, mode, store, body, **expected))
        return body

    return put


def run_fault(it: Fault, services: Services) -> Row:
    """Run one fault in a folder of its own, which is removed unless it failed."""
    row = Row(it.name, it.family, it.mode, it.store, it.promise)
    folder = services.folder / f"{len(list(services.folder.iterdir())):04d}"
    try:
        scene = Scene(services, folder, MODES[it.mode], it.store)
    except CannotRunError as error:
        return _skipped(row, folder, error)
    with scene.cleanup:
        try:
            _play(row, it, scene, services)
        except CannotRunError as error:
            scene.close()
            return _skipped(row, folder, error)
    if not row.wrong:
        row.outcome = it.promise
        shutil.rmtree(folder, ignore_errors=True)
    return row


def _play(row: Row, it: Fault, scene: Scene, services: Services) -> None:
    """Set off a fault, wait for the end of the run, and judge it."""
    end: Ended | None = None
    try:
        it.body(scene)
        if scene.tries == 0:
            scene.begin()
        end = scene.finish(it.deadline_s, resumes=it.promise == "recovered", max_tries=it.max_tries)
        if end is None:
            row.wrong.append(f"did not end within {it.deadline_s:.0f} s")
        elif scene.watched > scene.mode.explorers and scene.first is None:
            scene.first_ends()
        codes = scene.explorers_end() if end is not None and end.code == 0 else []
        row.wrong += [f"an explorer ended with exit code {code}" for code in codes if code]
    except (AssertionError, OSError, LookupError) as raised:  # the fault could not be set off
        row.wrong.append(f"{type(raised).__name__}: {str(raised).strip()[-300:]}")
    ended_at = time.time()
    left = scene.close()
    row.tries = scene.tries
    if end is None:
        return
    explorers_wait = it.promise == "diagnosed" and scene.mode.explorers  # for a trainer that is resumed
    if left and scene.watched == 0 and not explorers_wait:
        row.wrong.append(f"left running: {', '.join(left[:3])}")
    judge = _judge_recovery if it.promise == "recovered" else _judge_diagnosis
    judge(row, it, scene, end, services)
    if row.seconds_to_recovery is None and scene.hit_at is not None:
        row.seconds_to_recovery = round((scene.recovered_at or ended_at) - scene.hit_at, 1)


def _skipped(row: Row, folder: Path, error: Exception) -> Row:
    shutil.rmtree(folder, ignore_errors=True)
    row.outcome, row.message = "skipped", str(error)
    return row


def _judge_diagnosis(row: Row, it: Fault, scene: Scene, end: Ended, services: Services) -> None:
    row.message = last_line(end)
    if end.code != it.code:
        row.wrong.append(f"exit code {end.code}, not {it.code}")
    _require_words(row, it, end.err)
    if scene.watched > scene.mode.explorers and (scene.first is None or scene.first.code):
        row.wrong.append("the first command did not end well")


def _require_words(row: Row, it: Fault, text: str) -> None:
    row.wrong += [f"the message lacks `{word}`" for word in it.names if word not in text]
    if "Traceback" in text:
        row.wrong.append("a traceback instead of a message")


def _judge_recovery(row: Row, it: Fault, scene: Scene, end: Ended, services: Services) -> None:
    said = [each for each in scene.failures if each.code > 0]
    row.message = last_line(said[0]) if said else _of_signal(scene.failures) or warning(end)
    if scene.hit_at is None:
        row.wrong.append("the fault never happened")
        return
    for each in said:
        _require_words(row, it, each.err)
    if end.code != 0:
        row.wrong.append(f"exit code {end.code} after {scene.tries} tries: {last_line(end)}")
        return
    compare(row, scene.out, whole(scene, services))
    wanted = it.level or scene.mode.promise
    if LEVELS.index(row.level) < LEVELS.index(wanted):
        row.wrong.append(f"the run is {row.level}, not {wanted}")
    if row.lost or row.doubled:
        row.wrong.append(f"{row.lost} experiences lost, {row.doubled} doubled")
    row.wrong += buffer_faults(scene)


def _of_signal(ends: Sequence[Ended]) -> str:
    return f"killed by signal {-ends[0].code}" if ends else ""


def last_line(end: Ended) -> str:
    """The last line of what a command wrote to stderr."""
    lines = [line for line in end.err.splitlines() if line.strip() and not line.startswith(" ")]
    return lines[-1][:300] if lines else ""


def warning(end: Ended) -> str:
    """The first line of a command's output that says what happened to the run, or nothing."""
    words = ("again", "restart", "warning", "replaced", "lost", "fell back")
    lines = [line for line in (end.err + end.out).splitlines() if any(word in line.lower() for word in words)]
    return lines[0][:300] if lines else ""


def whole(scene: Scene, services: Services) -> Path:
    """The run directory of the same run, undisturbed; made once for each run file."""
    key = (scene.folder / "run.yaml").read_text() + scene.mode.name
    key = key.replace(str(scene.folder), "")
    if key not in services.wholes:
        folder = services.folder / f"whole-{len(services.wholes)}"
        other = Scene(services, folder, scene.mode, scene.store)
        other.write(**scene.changes)
        other.begin()
        end = other.finish(600, resumes=False)
        codes = other.explorers_end()
        other.close()
        assert end is not None, "the undisturbed run does not end"
        assert end.code == 0, f"the undisturbed run fails: {end.err}"
        assert not any(codes), "an explorer of the undisturbed run fails"
        services.wholes[key] = folder / "out"
    return services.wholes[key]


def compare(row: Row, run: Path, other: Path) -> None:
    """Compare a run with an undisturbed one: sets level, lost and doubled."""
    found, expected = learned(run), learned(other)
    ids = [one[0] for one in found]
    steps = [metrics["step"] for metrics in _metrics(run)]
    per_step = GROUPS * SIZE
    row.doubled = len(ids) - len(set(ids))
    count = len(expected)
    row.lost = max(0, count - len(set(ids)))
    row.level = "incomplete"
    if steps == list(range(1, STEPS + 1)) and count == STEPS * per_step and len(ids) == count and not row.doubled:
        row.level = "complete"
    if row.level == "complete" and found == expected:
        losses = [[metrics["loss"] for metrics in _metrics(each)] for each in (run, other)]
        if losses[0] == pytest.approx(losses[1], **LOSSES):
            row.level = "same rollouts"
        if comparable(run) == comparable(other):
            row.level = "bit-equal"


def comparable(run: Path) -> dict[str, Any]:
    """Everything that a run leaves behind but the numbers of its checkpoints, which an extra one changes."""
    found = outcome(run) | {"checkpoints": None}
    counts = ("environment/", "rollout/retries", "rollout/failed", "rollout/late", "judging/")  # of the fault itself
    found["metrics"] = [{key: row[key] for key in row if not key.startswith(counts)} for row in found["metrics"]]
    return found


def learned(run: Path) -> list[tuple[str, str, float]]:
    """Id, response and reward of each experience that a step has learned from, in order."""
    rows = [json.loads(line) for file in sorted((run / "rollouts").glob("*.jsonl")) for line in file.open()]
    return [(row["id"], row["response"], row["reward"]) for row in rows]


def _metrics(run: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "version" in row]


def buffer_faults(scene: Scene) -> list[str]:
    """What is wrong with the groups in a database: each that was learned from has to be there, once."""
    if scene.store == "memory":
        return []
    store = open_run_store(scene.out)
    kept = [group.id for _, group in store.read(ExperienceKind.ROLLOUT)]
    store.close()
    used = {json.loads(line)["group"] for file in (scene.out / "rollouts").glob("*.jsonl") for line in file.open()}
    wrong = [f"{len(kept) - len(set(kept))} groups twice in the buffer"] if len(kept) > len(set(kept)) else []
    return [*wrong, f"{len(used - set(kept))} groups missing in the buffer"] if used - set(kept) else wrong


def to_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Rows for bench/results/faults.json."""
    return [asdict(row) for row in rows]


def table(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table, by family."""
    lines = [
        "| fault | mode | outcome | tries | lost | doubled | seconds | message | commit |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        seen = f"{row.outcome}, {row.level}" if row.level and row.outcome != "diagnosed" else row.outcome
        numbers = ("", "", "") if row.outcome == "skipped" else (row.tries, row.lost, row.doubled)
        seconds = "" if row.seconds_to_recovery is None else f"{row.seconds_to_recovery:.1f}"
        said = "; ".join(row.wrong) if row.outcome == "FAILED" else row.message
        cells = [
            _cell(row.fault),
            f"{row.mode}, {row.store}",
            seen,
            *map(str, numbers),
            seconds,
            _cell(said),
            row.commit,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(text: str) -> str:
    text = " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
    return text if len(text) <= 160 else text[:157] + "..."
