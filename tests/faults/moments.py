"""Kills at every distinct file operation of a run: checkpoints, metrics, the buffer, and everything else it writes.

One run is recorded: each operation with its kind, the pattern of its path, and the code that asked for it. Then as many
runs as wanted are killed, each at one operation or a moment after it, and go on. All have to end bit-equal.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from faults.board import Fault, Row, run_fault
from faults.scene import MODES, Scene, Services

LATER_S = (0.0, 0.0005, 0.002, 0.006)
"""Seconds from an operation to the kill. Libraries in C and Rust write files between operations that Python sees."""
OF_CHECKPOINTS = 0.55
"""Share of the moments that lie within the writing of checkpoints."""


@dataclass(frozen=True)
class Operation:
    """An operation on files, as often as the recorded run did it."""

    kind: str
    path: str
    place: str
    count: int

    @property
    def area(self) -> str:
        """The part of the run directory: checkpoints, metrics, buffer, or the rest."""
        if self.kind in ("sql", "metrics"):
            return {"sql": "buffer"}.get(self.kind, self.kind)
        first = self.path.partition("/")[0]
        if "metrics.jsonl" in first:
            return "metrics"
        return first if first in ("checkpoints", "rollouts", "evaluations") else "rest"


@dataclass(frozen=True)
class Moment:
    """A kill: `seconds` after the `nth` time of an operation."""

    operation: Operation
    nth: int
    seconds: float


def _prepared(scene: Scene) -> None:
    scene.write(checkpoint={"every": 2, "keep_last": 2})


def record(services: Services) -> list[Operation]:
    """Run once without a fault, and list its operations in the order in which they first happened."""
    scene = Scene(services, services.folder / "recorded", MODES["inline"], "sqlite")
    _prepared(scene)
    scene.plan["record"] = True
    scene.begin()
    end = scene.finish(240, resumes=False)
    scene.close()
    assert end is not None, "the recorded run does not end"
    assert end.code == 0, end.err
    counts: dict[tuple[str, str, str], Counter[int]] = {}
    for line in (scene.folder / "operations.jsonl").open():
        one = json.loads(line)
        counts.setdefault((one["kind"], one["path"], one["place"]), Counter())[one["pid"]] += 1
    return [
        Operation(*key, max(each.values())) for key, each in counts.items() if key[0] not in ("reward", "optimizer")
    ]


def choose(operations: list[Operation], count: int) -> list[Moment]:
    """Moments at all operations in turn, more than half of them within the writing of checkpoints."""
    within = [each for each in operations if each.area == "checkpoints"]
    rest = [each for each in operations if each.area != "checkpoints"]
    first = _in_turn(within, round(count * OF_CHECKPOINTS))
    return first + _in_turn(rest, count - len(first))


def _in_turn(operations: list[Operation], count: int) -> list[Moment]:
    found = [moment for variant in _variants() for moment in (variant(each) for each in operations) if moment]
    return list(dict.fromkeys(found))[:count]


def _variants() -> Iterator[Callable[[Operation], Moment | None]]:
    """Yield which time of an operation, and how long after it. Heartbeats come by the clock: only the first."""
    for seconds in LATER_S:
        for share in (0.0, 1.0, 0.5):

            def variant(one: Operation, share: float = share, seconds: float = seconds) -> Moment | None:
                by_clock = "processes/" in one.path
                nth = 1 if by_clock else 1 + round(share * (one.count - 1))
                return None if by_clock and share else Moment(one, nth, seconds)

            yield variant


def run_moment(moment: Moment, services: Services) -> Row:
    """Kill a run at a moment, let it go on, and compare it with an undisturbed one."""
    one = moment.operation

    def body(scene: Scene) -> None:
        _prepared(scene)
        scene.trap(one.kind, one.path, place=one.place, nth=moment.nth, seconds=moment.seconds)

    name = f"killed {1000 * moment.seconds:g} ms after {one.kind} {one.path} ({one.place}), time {moment.nth}"
    return run_fault(Fault(name, "moments", "inline", "sqlite", body), services)


def to_json(moment: Moment, row: Row) -> dict[str, Any]:
    """A kill for bench/results/faults.json."""
    one = moment.operation
    kept = {key: getattr(row, key) for key in ("level", "tries", "lost", "doubled", "seconds_to_recovery", "wrong")}
    return {"kill": row.fault, "area": one.area, "operation": f"{one.kind} {one.path} {one.place}", **kept}


def summary(kills: list[dict[str, Any]]) -> str:
    """A Markdown table of kills by area."""
    lines = [
        "| operations on | distinct operations | kills | bit-equal | lost | doubled | longest recovery (s) |",
        "|---|---|---|---|---|---|---|",
    ]
    for area in dict.fromkeys(kill["area"] for kill in kills):
        some = [kill for kill in kills if kill["area"] == area]
        equal = sum(kill["level"] == "bit-equal" and not kill["wrong"] for kill in some)
        lost, doubled = (sum(kill[key] for kill in some) for key in ("lost", "doubled"))
        longest = max(kill["seconds_to_recovery"] or 0.0 for kill in some)
        operations = len({kill["operation"] for kill in some})
        lines.append(f"| {area} | {operations} | {len(some)} | {equal} | {lost} | {doubled} | {longest} |")
    return "\n".join(lines)
