"""Builds the summary of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollmill.config.run import StageConfig
from rollmill.orchestrator.checkpoint import Checkpoints
from rollmill.orchestrator.extension import reopened_stage
from rollmill.orchestrator.state import RunState
from rollmill.trackers.event_log import RESTART, read_events
from rollmill.trackers.metrics_log import peak_rss_mb


def summarise(state: RunState, stages: list[str], checkpoints: Checkpoints, status: str = "done") -> dict[str, Any]:
    """Build the contents of summary.json.

    accuracy_before and accuracy_after are the first and the last evaluation of the last stage that was evaluated:
    greedy accuracy, or sampled accuracy without greedy, of the first set; null if there was none. An evaluation that
    left this set out, as its domain was paused, does not count.
    """
    evaluated = state.evaluations[-1]["stage"] if state.evaluations else None
    accuracies = _accuracies([record for record in state.evaluations if record["stage"] == evaluated])
    steps = checkpoints.steps()
    return {
        "status": status,
        "stages": stages,
        "steps": state.step,
        "accuracy_before": accuracies[0] if accuracies else None,
        "accuracy_after": accuracies[-1] if accuracies else None,
        "evaluations": state.evaluations,
        "seconds_by_stage": state.seconds,
        "seconds": sum(state.seconds.values()),
        "generated_tokens": state.generated_tokens,
        "tokens_per_second": state.generated_tokens / state.generation_seconds if state.generation_seconds else None,
        "peak_rss_mb": peak_rss_mb(),
        "restarts": len(read_events(checkpoints.folder.parent, RESTART)),
        "checkpoint": str(checkpoints.path(steps[-1])) if steps else None,
        "best_step": state.best_step,
        "best_checkpoint": str(checkpoints.path(state.best_step)) if state.best_step in steps else None,
    }


def summarise_complete_run(checkpoints: Checkpoints, stages: Sequence[StageConfig]) -> dict[str, Any] | None:
    """Build the summary from the newest checkpoint, if all stages were done then; else None."""
    steps = checkpoints.steps()
    if not steps:
        return None
    state, trainer = checkpoints.read(steps[-1])
    if state.stage < len(stages) or reopened_stage(trainer, stages) is not None:
        return None
    return summarise(state, [stage.name for stage in stages], checkpoints)


def _accuracies(records: list[dict[str, Any]]) -> list[float]:
    """The accuracy of the first set in each evaluation of a stage that has it."""
    most = max(records, key=len, default={})  # without sets that were left out
    for key in most:  # set by set, greedy before sampled
        if key.startswith("eval/") and key.endswith(("/greedy", "/sampled")):
            return [float(record[key]) for record in records if key in record]
    return []
