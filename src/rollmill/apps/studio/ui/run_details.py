"""Status, events, pipeline and timelines of one run, as the pages show them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from rollmill.apps.studio.ui.catalog import read_last_rows
from rollmill.apps.studio.ui.metric_columns import MetricColumns
from rollmill.errors import RollmillError
from rollmill.files import read_text
from rollmill.trackers.activity_log import Activity, read_activities
from rollmill.trackers.event_log import read_events
from rollmill.trackers.heartbeat import CONFIG, TRAINER_PROCESS, activity_file, process_state, read_heartbeats
from rollmill.trackers.metrics_log import read_summary
from rollmill.trackers.step_timeline import TIMELINE_FILE

_EVENTS = 500
_SPANS = 800
"""Spans of a process that a page shows."""
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


def process_timeline(run_dir: Path, seconds: float | None) -> dict[str, Any]:
    """Report what each process did in the last `seconds` before the run's last sign of life (None: all recorded).

    Returns:
        `begin` and `end`, seconds since the epoch, and `processes`, each with `name`, `state` and `spans`, lists of
        [start, end, activity, what it waited for, version of the weights], start and end in seconds since `begin`.
        Where more than 800 spans are in the time, a span is the longest of its 800th part.
    """
    now = time.time()
    found = []
    for beat in read_heartbeats(run_dir):
        state, activities = process_state(beat, now), read_activities(activity_file(run_dir, beat.name))
        last = now if state == "alive" else max([beat.beat, *(each.time for each in activities[-1:])])
        found.append((beat, state, last, activities))
    found.sort(key=lambda each: not each[0].name.startswith(TRAINER_PROCESS))
    begins = [activities[0].time for _, _, _, activities in found if activities]
    if not begins:
        return {"begin": now, "end": now, "processes": []}
    end = max(last for _, _, last, _ in found)
    begin = min(begins) if seconds is None else max(min(begins), end - seconds)
    processes = [
        {"name": beat.name, "state": state, "spans": _thinned(_spans(activities, last, begin), end - begin)}
        for beat, state, last, activities in found
    ]
    return {"begin": begin, "end": end, "processes": processes}


_Span = tuple[float, float, str, str, int]


def _spans(activities: Sequence[Activity], last: float, begin: float) -> list[_Span]:
    """Spans from `begin` on, relative to it; one goes on until the next, or until the process's `last` sign of life."""
    found: list[_Span] = []
    ends = [each.time for each in activities[1:]] + [last]
    for each, end in zip(activities, ends, strict=True):
        if each.doing and end > begin:
            start = max(each.time, begin) - begin
            found.append((start, max(end - begin, start), each.kind, each.waits_for, each.version))
    return found


def _thinned(spans: list[_Span], length: float) -> list[_Span]:
    """At most _SPANS spans: of those that begin in the same part of the time, the longest, until the next one begins;
    neighbours that are alike become one."""
    if len(spans) > _SPANS:
        longest: dict[int, _Span] = {}
        for span in spans:
            part = int(span[0] / max(length, 1e-9) * _SPANS)
            if part not in longest or span[1] - span[0] > longest[part][1] - longest[part][0]:
                longest[part] = span
        chosen = [longest[part] for part in sorted(longest)]
        ends = [span[0] for span in chosen[1:]] + [spans[-1][1]]
        spans = [(span[0], end, *span[2:]) for span, end in zip(chosen, ends, strict=True)]
    merged: list[_Span] = []
    for span in spans:
        if merged and merged[-1][2:] == span[2:] and span[0] - merged[-1][1] < 1e-3:
            merged[-1] = (merged[-1][0], *span[1:])
        else:
            merged.append(span)
    return [(round(start, 3), round(end, 3), *rest) for start, end, *rest in merged]  # type: ignore[misc]
