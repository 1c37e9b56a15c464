"""Loads a run from its newest whole checkpoint: damaged ones are set aside, and the run goes on from the one before."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollmill.config.loader import LoadedRun
from rollmill.errors import CheckpointError, DamagedCheckpointError
from rollmill.files import sweep_temporary
from rollmill.orchestrator.checkpoint import Checkpoints
from rollmill.orchestrator.manifest import Manifest, find_damage, read_manifest, verifying
from rollmill.orchestrator.model_fingerprints import check_models
from rollmill.orchestrator.setup import MACHINE, RunSetup, read_run_id, set_up_run
from rollmill.orchestrator.state import RunState
from rollmill.trackers.metrics_log import METRICS_FILE, read_metrics


@dataclass(frozen=True)
class StartPoint:
    """A run's setup, and where it goes on."""

    setup: RunSetup
    step: int = 0  #: of the checkpoint; 0 without one
    start: tuple[RunState, dict[str, Any]] | None = None  #: the checkpoint's state and trainer state
    messages: list[str] = field(default_factory=list)  #: for the user


def load_start_point(loaded: LoadedRun, run_dir: Path, *, resumed: bool) -> StartPoint:
    """Load a run's newest whole checkpoint, or its model if it has none, and remove leftovers of killed processes.

    A checkpoint is verified while it is loaded. A damaged one is renamed to `damaged-N`, and the one before it is used.

    Args:
        resumed: False for a new run, which has no checkpoints.

    Raises:
        CheckpointError: all checkpoints are damaged, or one is of another format, or of another run.
        RollmillError: the run cannot be set up; see `set_up_run`.
    """
    checkpoints = Checkpoints(run_dir)
    checkpoints.sweep()
    sweep_temporary(run_dir)
    messages: list[str] = []
    while resumed and (steps := checkpoints.steps()):
        step = steps[-1]
        _require_own(checkpoints, run_dir)
        try:
            with verifying(checkpoints.path(step)):
                parted = all(stage.trainer.shards_weights for stage in loaded.stages)
                start = checkpoints.read(step, mapped=parted)
                setup = set_up_run(loaded, run_dir, step)
        except DamagedCheckpointError as error:
            messages.append(_set_aside(checkpoints, step, error.damage))
            continue
        if messages:
            messages.append(f"the run goes on from the checkpoint of step {step}, the newest one that is whole")
        messages += _lost_metrics(run_dir, step)
        return StartPoint(setup, step, start, [*messages, *check_models(loaded, run_dir)])
    if resumed and (aside := checkpoints.damaged()):
        damage = messages or [f"{path} is damaged" for path in aside]
        raise CheckpointError(
            f"{run_dir} has no whole checkpoint left: {'; '.join(damage)}. Put the files of one back and rename its "
            f"folder to step-N, or start again by `rollmill run {run_dir}/config.yaml --out FOLDER`."
        )
    setup = set_up_run(loaded, run_dir, None)
    return StartPoint(setup, messages=check_models(loaded, run_dir))


def _lost_metrics(run_dir: Path, step: int) -> list[str]:
    """A message if metrics.jsonl lacks steps up to `step`, such as after it was edited or put back from a copy."""
    written = {row.get("step") for row in read_metrics(run_dir)}
    lost = {each for each in range(1, step + 1) if each not in written}
    if not lost:
        return []
    starts = sorted(each for each in lost if each - 1 not in lost)
    ends = sorted(each for each in lost if each + 1 not in lost)
    spans = [f"{a}" if a == b else f"{a} to {b}" for a, b in zip(starts, ends, strict=True)]
    shown = ", ".join(spans[:5]) + (", ..." if len(spans) > 5 else "")
    return [
        f"{METRICS_FILE} lacks {len(lost)} steps ({shown}); training goes on, but curves and reports have gaps. "
        "Put the file back to have them"
    ]


def _require_own(checkpoints: Checkpoints, run_dir: Path) -> None:
    """Raise CheckpointError if a checkpoint was written by another run than the others, or than machine.json says."""
    ids = {step: each.run_id for step in checkpoints.steps() if (each := _manifest(checkpoints.path(step))) is not None}
    own, first = read_run_id(run_dir), f"{run_dir / MACHINE} names"
    if own is None and ids:
        own, first = next(iter(ids.values())), f"{checkpoints.path(next(iter(ids)))} belongs to"
    if foreign := [step for step, each in ids.items() if each != own]:
        path = checkpoints.path(foreign[-1])
        raise CheckpointError(
            f"{path} was written by the run {ids[foreign[-1]]}, but {first} the run {own}. Move what was copied from "
            f"elsewhere out of {path.parent}; to train from its weights, start a new run with it as model.path."
        )


def _manifest(folder: Path) -> Manifest | None:
    with suppress(CheckpointError):  # damaged, or of a later format: said when it is loaded
        return read_manifest(folder)
    return None


def _set_aside(checkpoints: Checkpoints, step: int, known: list[str]) -> str:
    """Move a damaged checkpoint aside; returns a message that names all of its damaged files."""
    damage = find_damage(checkpoints.path(step)) or known
    moved = checkpoints.move_aside(step)
    return f"the checkpoint of step {step} is damaged ({'; '.join(damage)}) and kept as {moved}"
