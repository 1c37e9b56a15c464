"""Draws timelines for the report: the spans of single steps, and seconds by phase over the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rollmill.apps.studio.report.charts import MetricsRow, format_tick, nice_ticks
from rollmill.trackers.metrics_log import is_finite_number
from rollmill.trackers.trace import ON_DEVICE

WIDTH, LEFT, RIGHT = 1180, 130, 1165
_PHASE_HEIGHT, _LANE_HEIGHT, _GAP = 14, 84, 12
_MAX_SPAN_BARS = 56


@dataclass(frozen=True)
class TimelineBar:
    """One span in page coordinates: `x` to `middle` queued, `middle` to `end` running."""

    x: float
    middle: float
    end: float
    y: float
    height: float
    kind: str


@dataclass(frozen=True)
class TimelineLane:
    """The spans of one kind."""

    name: str
    note: str
    y: float
    bars: list[TimelineBar]


@dataclass(frozen=True)
class StepTimeline:
    """Timeline of one step."""

    step: int
    seconds: float
    height: float
    lanes: list[TimelineLane]
    ticks: list[tuple[float, str]]


def draw_step_timeline(row: dict[str, Any], phases: Sequence[str]) -> StepTimeline:
    """Lay out a line of the file: a lane of phases, one for each component on the device, and one each for generation
    and every reward."""
    spans: dict[str, list[list[float]]] = row["spans"]
    begin = min((times[0] for some in spans.values() for times in some), default=0.0)
    end = max((times[2] for some in spans.values() for times in some), default=0.0)
    begin, end = min(begin, 0.0), max(end, row["seconds"])

    def place(seconds: float) -> float:
        return float(round(LEFT + (seconds - begin) / max(end - begin, 1e-9) * (RIGHT - LEFT), 2))

    lanes, y = [_phase_lane(spans, phases, place)], float(_PHASE_HEIGHT + _GAP)
    components = sorted({kind.split("/", 2)[2] for kind in spans if kind.startswith(ON_DEVICE)})
    for name in components:
        lanes.append(_component_lane(name, spans, row.get("bytes", {}), y, place))
        y += 2 * _PHASE_HEIGHT + _GAP
    others = {kind for kind in spans if kind not in phases and not kind.startswith(ON_DEVICE)}
    for kind in sorted(others, key=lambda kind: (kind.startswith("reward/"), kind)):
        lane, height = _lane(kind, spans[kind], y, place)
        lanes.append(lane)
        y += height + _GAP
    ticks = [(place(at), f"{format_tick(at)} s") for at in nice_ticks(begin, end) if begin <= at <= end]
    return StepTimeline(row["step"], row["seconds"], y + 16, lanes, ticks)


def _phase_lane(spans: dict[str, list[list[float]]], phases: Sequence[str], place: Any) -> TimelineLane:
    bars = [
        TimelineBar(place(times[1]), place(times[1]), place(times[2]), 0.0, _PHASE_HEIGHT, phase)
        for phase in phases
        for times in spans.get(phase, [])
    ]
    return TimelineLane("step", "", 0.0, bars)


def _component_lane(
    name: str, spans: dict[str, list[list[float]]], sizes: dict[str, int], y: float, place: Any
) -> TimelineLane:
    """The phases in which a component is on the device, and its size."""
    bars, most = [], 0
    for kind, found in spans.items():
        if kind.startswith(ON_DEVICE) and kind.split("/", 2)[2] == name:
            phase, most = kind.split("/", 2)[1], max(most, sizes.get(kind, 0))
            bars += [TimelineBar(place(at[1]), place(at[1]), place(at[2]), y, _PHASE_HEIGHT, phase) for at in found]
    size = f"{most / 1e9:.3g} GB" if most >= 1e8 else f"{most / 1e6:.3g} MB"
    return TimelineLane(name.replace("_", " "), f"on the device, {size}", y, bars)


def _lane(kind: str, times: list[list[float]], y: float, place: Any) -> tuple[TimelineLane, float]:
    ordered = sorted(times)
    shown = ordered[:: -(-len(ordered) // _MAX_SPAN_BARS)]
    height = min(6.0, _LANE_HEIGHT / len(shown))
    bars = [
        TimelineBar(
            place(requested), place(started), place(ended), round(y + i * height, 2), round(0.8 * height, 2), kind
        )
        for i, (requested, started, ended) in enumerate(shown)
    ]
    mean = sum(ended - started for _, started, ended in ordered) / len(ordered)
    note = f"{len(ordered)}, mean {format_tick(mean)} s"
    return TimelineLane(kind.removeprefix("reward/"), note, y, bars), max(height * len(shown), 30.0)


# Seconds by phase, by step and by stage

PHASES = ("move", "rollout", "inference", "reward", "train", "eval", "checkpoint")
_MAX_PHASE_BARS = 120


def phase_names(rows: Sequence[MetricsRow]) -> list[str]:
    """Phases that some step spent time in, known ones first; `other` is the rest of the total."""
    spent = {phase for row in rows for phase, seconds in step_phases(row).items() if seconds > 0}
    return (
        [phase for phase in PHASES if phase in spent]
        + sorted(spent - {*PHASES, "other"})
        + ["other"] * ("other" in spent)
    )


def step_phases(row: MetricsRow) -> dict[str, float]:
    """Seconds by phase of one step. Overlapping phases may add up to more than the step's total."""
    phases = {
        key.removeprefix("seconds/"): float(value)
        for key, value in row.items()
        if key.startswith("seconds/") and key != "seconds/total" and is_finite_number(value)
    }
    total = row.get("seconds/total")
    if total is not None and is_finite_number(total) and total - sum(phases.values()) > 0.005 * total:
        phases["other"] = total - sum(phases.values())
    return phases


def phase_totals(rows: Sequence[MetricsRow]) -> dict[str, float]:
    """Seconds by phase of the whole run."""
    return {phase: sum(step_phases(row).get(phase, 0.0) for row in rows) for phase in phase_names(rows)}


def seconds_by_stage(rows: Sequence[MetricsRow]) -> dict[str, float]:
    """Seconds by stage, from the steps' totals."""
    stages: dict[str, float] = {}
    for row in rows:
        if is_finite_number(row.get("seconds/total")):
            name = str(row.get("stage", "run"))
            stages[name] = stages.get(name, 0.0) + row["seconds/total"]
    return stages


def phase_timeline(rows: Sequence[MetricsRow]) -> dict[str, Any]:
    """Bars of mean seconds by phase for the report: {"longest": s, "stages": [{"name", "bars": [{"label", "parts"}]}]}.

    A part is (phase, percent of the longest bar, seconds).
    """
    timed = [row for row in rows if step_phases(row)]
    phases = phase_names(timed)
    size = max(1, -(-len(timed) // _MAX_PHASE_BARS))
    stages: list[dict[str, Any]] = []
    for row in timed:
        name = str(row.get("stage", ""))
        if not stages or stages[-1]["name"] != name:
            stages.append({"name": name, "rows": []})
        stages[-1]["rows"].append(row)
    for stage in stages:
        some = stage.pop("rows")
        stage["bars"] = [_bar(some[begin : begin + size], phases) for begin in range(0, len(some), size)]
    longest = max((bar["total"] for stage in stages for bar in stage["bars"]), default=0.0)
    for stage in stages:
        for bar in stage["bars"]:
            bar["parts"] = [(name, 100 * seconds / longest, seconds) for name, seconds in bar["parts"] if seconds > 0]
    return {"longest": longest, "stages": stages, "phases": phases, "steps_per_bar": size}


def _bar(rows: Sequence[MetricsRow], phases: Sequence[str]) -> dict[str, Any]:
    parts = [(phase, sum(step_phases(row).get(phase, 0.0) for row in rows) / len(rows)) for phase in phases]
    steps = str(rows[0]["step"]) if len(rows) == 1 else f"{rows[0]['step']} to {rows[-1]['step']}"
    return {"label": f"step {steps}", "parts": parts, "total": sum(seconds for _, seconds in parts)}
