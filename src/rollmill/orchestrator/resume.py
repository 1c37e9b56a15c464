"""Loads a run from its newest whole checkpoint: damaged ones are set aside, and the run goes on from the one before."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollmill.config.loader import LoadedRun
from rollmill.errors import CheckpointError, DamagedCheckpointError
from rollmill.files import sweep_temporary
from rollmill.orchestrator.checkpoint import Checkpoints
from rollmill.orchestrator.manifest import find_damage, read_manifest, verifying
from rollmill.orchestrator.setup import RunSetup, set_up_run
from rollmill.orchestrator.state import RunState


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
        CheckpointError: all checkpoints are damaged, or one is of a later format.
        RollmillError: the run cannot be set up; see `set_up_run`.
    """
    checkpoints = Checkpoints(run_dir)
    checkpoints.sweep()
    sweep_temporary(run_dir)
    messages: list[str] = []
    while resumed and (steps := checkpoints.steps()):
        step = steps[-1]
        try:
            with verifying(checkpoints.path(step)):
                start = checkpoints.read(step)
                setup = set_up_run(loaded, run_dir, step)
        except DamagedCheckpointError as error:
            messages.append(_set_aside(checkpoints, step, error))
            continue
        if messages:
            messages.append(f"the run goes on from the checkpoint of step {step}, the newest one that is whole")
        if read_manifest(checkpoints.path(step)) is None:
            messages.append(f"the checkpoint of step {step} has format 0, without hashes; it could not be verified")
        return StartPoint(setup, step, start, messages)
    if resumed and (aside := checkpoints.set_aside()):
        damage = messages or [f"{path} is damaged" for path in aside]
        raise CheckpointError(
            f"{run_dir} has no whole checkpoint left: {'; '.join(damage)}. Put the files of one back and rename its "
            f"folder to step-N, or start again by `rollmill run {run_dir}/config.yaml --out FOLDER`."
        )
    return StartPoint(set_up_run(loaded, run_dir, None))


def _set_aside(checkpoints: Checkpoints, step: int, error: DamagedCheckpointError) -> str:
    """Move a damaged checkpoint aside; returns a message that names all of its damaged files."""
    damage = find_damage(checkpoints.path(step)) or error.damage
    moved = checkpoints.move_aside(step)
    return f"the checkpoint of step {step} is damaged ({'; '.join(damage)}) and kept as {moved}"
