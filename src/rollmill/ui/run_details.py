"""Status, events, pipeline and timelines of one run, as the pages show them."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from rollmill.errors import RollmillError
from rollmill.files import read_text
from rollmill.report.step_timeline import TIMELINE_FILE
from rollmill.trackers.event_log import read_events
from rollmill.trackers.heartbeat import CONFIG, process_state, read_heartbeats
from rollmill.trackers.metrics_log import read_summary
from rollmill.ui.catalog import read_last_rows
from rollmill.ui.metric_columns import MetricColumns

_EVENTS = 500
_FUNNEL_PARTS = ("kept", "changed", "dropped", "added")


def run_details(run_dir: Path, columns: MetricColumns) -> dict[str, Any]:
    """Describe a run: processes, events, summary, metrics that it has, its stages and domains."""
    now = time.time()
    problems = []
    try:
        summary = read_summary(run_dir)
    except RollmillError as error:
        summary, problems = {}, [str(error)]
    if columns.damaged:
        problems.append(f"metrics.jsonl: {columns.damaged} damaged lines are left out")
    return {
        "now": now,
        "processes": [asdict(beat) | {"state": process_state(beat, now)} for beat in read_heartbeats(run_dir)],
        "events": read_events(run_dir)[-_EVENTS:],
        "summary": summary,
        "keys": columns.keys,
        "stages": columns.stages,
        "domains": sorted({key.split("/")[1] for key in columns.keys if key.startswith("domain/") and "/" in key[7:]}),
        "rows": len(columns.steps),
        "first_step": columns.steps[0] if len(columns.steps) else 0,
        "last_step": columns.steps[-1] if len(columns.steps) else 0,
        "problems": problems,
    }


def run_file(run_dir: Path) -> str:
    """The resolved run file; empty if there is none."""
    path = run_dir / CONFIG
    try:
        return read_text(path) if path.is_file() else ""
    except RollmillError as error:
        return f"# {error}"


def pipeline_funnel(columns: MetricColumns, first: int, last: int) -> dict[str, Any]:
    """Sum what the pipeline did over some steps.

    Returns:
        `groups` before the pipeline; `operators` in the order in which they ran, each with `kept`, `changed`,
        `dropped` and `added` experiences and `reasons`; `experiences` that were learned from; other counts by name.
    """

    def total(key: str) -> float:
        steps, values = columns.values(key)
        return float(np.nansum(values[(steps >= first) & (steps <= last)]))

    names: dict[str, dict[str, Any]] = {}
    for key in columns.keys:
        if key.startswith("pipeline/") and key.count("/") >= 2:
            name, _, part = key.removeprefix("pipeline/").rpartition("/")
            entry = names.setdefault(
                name, {"name": name, "kept": 0, "changed": 0, "dropped": 0, "added": 0, "reasons": {}}
            )
            if part in _FUNNEL_PARTS:
                entry[part] = total(key)
            else:
                entry["reasons"][part] = total(key)
    others = (
        "rollout/failed",
        "rollout/rejected",
        "rollout/empty_groups",
        "rollout/stopped",
        "raw/late",
        "replay/groups",
    )
    return {
        "first": first,
        "last": last,
        "groups": total("raw/groups"),
        "completions": total("completions"),
        "judged": total("judged"),
        "experiences": total("experiences"),
        "tokens": total("tokens"),
        "operators": list(names.values()),
        "others": {key: total(key) for key in others if key in columns.keys},
    }


def step_timeline(run_dir: Path, step: int | None) -> dict[str, Any]:
    """The recorded timeline of a step (default: the newest), and the `steps` that have one, of the newest ones."""
    rows = {row["step"]: row for row in read_last_rows(run_dir / TIMELINE_FILE) if isinstance(row.get("spans"), dict)}
    if not rows:
        return {"steps": [], "timeline": None}
    chosen = step if step in rows else max(rows)
    return {"steps": sorted(rows), "timeline": rows[chosen]}
