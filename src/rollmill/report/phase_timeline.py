"""Where the time of a run went: seconds by phase, by step and by stage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollmill.report.charts import MetricsRow, is_plottable

PHASES = ("move", "rollout", "inference", "reward", "train", "eval", "checkpoint")
_MOST_BARS = 120


def phase_names(rows: Sequence[MetricsRow]) -> list[str]:
    """The phases some step spent time in, the known ones first; `other` is what their sum leaves of the total."""
    spent = {phase for row in rows for phase, seconds in step_phases(row).items() if seconds > 0}
    return (
        [phase for phase in PHASES if phase in spent]
        + sorted(spent - {*PHASES, "other"})
        + ["other"] * ("other" in spent)
    )


def step_phases(row: MetricsRow) -> dict[str, float]:
    """Seconds by phase of one step. Phases that overlap may add up to more than the step took."""
    phases = {
        key.removeprefix("seconds/"): float(value)
        for key, value in row.items()
        if key.startswith("seconds/") and key != "seconds/total" and is_plottable(value)
    }
    total = row.get("seconds/total")
    if total is not None and is_plottable(total) and total - sum(phases.values()) > 0.005 * total:
        phases["other"] = total - sum(phases.values())
    return phases


def phase_totals(rows: Sequence[MetricsRow]) -> dict[str, float]:
    """Seconds by phase of the whole run."""
    return {phase: sum(step_phases(row).get(phase, 0.0) for row in rows) for phase in phase_names(rows)}


def seconds_by_stage(rows: Sequence[MetricsRow]) -> dict[str, float]:
    """Seconds by stage, from the steps' totals."""
    stages: dict[str, float] = {}
    for row in rows:
        if is_plottable(row.get("seconds/total")):
            name = str(row.get("stage", "run"))
            stages[name] = stages.get(name, 0.0) + row["seconds/total"]
    return stages


def phase_timeline(rows: Sequence[MetricsRow]) -> dict[str, Any]:
    """Bars of mean seconds by phase for the report: {"longest": s, "stages": [{"name", "bars": [{"label", "parts"}]}]}.

    A part is (phase, percent of the longest bar, seconds).
    """
    timed = [row for row in rows if step_phases(row)]
    phases = phase_names(timed)
    size = max(1, -(-len(timed) // _MOST_BARS))
    stages: list[dict[str, Any]] = []
    for row in timed:
        name = str(row.get("stage", ""))
        if not stages or stages[-1]["name"] != name:
            stages.append({"name": name, "rows": []})
        stages[-1]["rows"].append(row)
    for stage in stages:
        own = stage.pop("rows")
        stage["bars"] = [_bar(own[begin : begin + size], phases) for begin in range(0, len(own), size)]
    longest = max((bar["total"] for stage in stages for bar in stage["bars"]), default=0.0)
    for stage in stages:
        for bar in stage["bars"]:
            bar["parts"] = [(name, 100 * seconds / longest, seconds) for name, seconds in bar["parts"] if seconds > 0]
    return {"longest": longest, "stages": stages, "phases": phases, "steps_per_bar": size}


def _bar(rows: Sequence[MetricsRow], phases: Sequence[str]) -> dict[str, Any]:
    parts = [(phase, sum(step_phases(row).get(phase, 0.0) for row in rows) / len(rows)) for phase in phases]
    steps = str(rows[0]["step"]) if len(rows) == 1 else f"{rows[0]['step']} to {rows[-1]['step']}"
    return {"label": f"step {steps}", "parts": parts, "total": sum(seconds for _, seconds in parts)}
