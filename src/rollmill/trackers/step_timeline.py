"""Spans of single steps in timeline.jsonl, from which the report draws timelines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollmill.files import atomic_write, explain_write_errors
from rollmill.trackers.metrics_log import read_jsonl_rows
from rollmill.trackers.trace import Span

TIMELINE_FILE = "timeline.jsonl"


def write_step_timeline(run_dir: Path, metrics: dict[str, Any], began: float, spans: Sequence[Span]) -> None:
    """Append a step's line: {"step", "stage", "seconds", "spans": {kind: [[requested, started, ended], ...]}}.

    Times are seconds since the start of the step; spans that started before it have negative times. `bytes`, if there
    are any, has the size of each component on the device, the largest of the step.
    """
    kinds: dict[str, list[list[float]]] = {}
    sizes: dict[str, int] = {}
    for span in spans:
        times = [round(each - began, 5) for each in (span.requested, span.started, span.ended)]
        kinds.setdefault(span.kind, []).append(times)
        if span.bytes:
            sizes[span.kind] = max(span.bytes, sizes.get(span.kind, 0))
    line = {"step": metrics["step"], "stage": metrics["stage"], "seconds": metrics["seconds/total"], "spans": kinds}
    line |= {"bytes": sizes} if sizes else {}
    path = run_dir / TIMELINE_FILE
    with explain_write_errors(path), path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def read_step_timelines(run_dir: Path) -> dict[int, dict[str, Any]]:
    """Read the lines by step; the last one if a step was written twice. Raises RollmillError on a damaged line."""
    return {int(row["step"]): row for row in read_jsonl_rows(run_dir / TIMELINE_FILE)}


def drop_steps_after(run_dir: Path, step: int) -> None:
    """Remove the lines of later steps, which a resumed run writes again, and the incomplete line of a killed run."""
    path = run_dir / TIMELINE_FILE
    if path.is_file():
        rows = [row for row in read_jsonl_rows(path) if row["step"] <= step]
        atomic_write(path, "".join(json.dumps(row) + "\n" for row in rows).encode(), durable=True)
