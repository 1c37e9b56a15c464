"""Start, resume and evaluate runs: from a run file to an orchestrator with all its components."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from rollmill.config.checks.extras import require_extras
from rollmill.config.loader import LoadedRun, load_run
from rollmill.config.placement import RayPlacement
from rollmill.config.workflows import LiveRequestsWorkflow
from rollmill.errors import CheckpointError, ConfigError, UserExitError
from rollmill.files import atomic_write
from rollmill.orchestrator.buffers import Buffers
from rollmill.orchestrator.checkpoint import Checkpoints
from rollmill.orchestrator.exploring import count_explored
from rollmill.orchestrator.extension import change_settings
from rollmill.orchestrator.interrupt import Interrupted, Interrupts
from rollmill.orchestrator.manifest import model_files, verifying
from rollmill.orchestrator.memory_choice import with_kept_choice
from rollmill.orchestrator.monitor import Monitor
from rollmill.orchestrator.orchestrator import Orchestrator, Serving
from rollmill.orchestrator.resume import load_start_point
from rollmill.orchestrator.run_control import CHANGES_FILE, Callback, RunControl
from rollmill.orchestrator.setup import (
    MACHINE,
    RunSetup,
    read_machine,
    require_models,
    set_up_run,
    stage_overrides,
)
from rollmill.orchestrator.stages import Stage
from rollmill.orchestrator.summary import summarise
from rollmill.progress import ends_for_restart, uncounted_work
from rollmill.remote.joined_explorers import JoinedExplorers
from rollmill.remote.rollouts import ExplorerFleet
from rollmill.remote.scaling import SCALE_ANSWER, SCALE_REQUEST
from rollmill.rewards.resources import close_warm_pools
from rollmill.startup import open_missing_streams, require_usable_paths
from rollmill.supervision.attempt import RunAttempt
from rollmill.supervision.memory import MemoryReduction
from rollmill.supervision.run_lock import hold_run_lock, is_run_locked
from rollmill.trackers.event_log import EVENTS_FILE
from rollmill.trackers.heartbeat import HEARTBEAT_FOLDER as PROCESSES
from rollmill.trackers.heartbeat import TRAINER_PROCESS, keep_heartbeat
from rollmill.trackers.metrics_log import read_metrics
from rollmill.trackers.run_views import RunView, make_view

CONFIG = "config.yaml"


def run(
    source: str | Path, overrides: Sequence[str] = (), out: str | Path | None = None, view: RunView | None = None
) -> dict[str, Any]:
    """Run a run file and return the summary (the contents of summary.json).

    Args:
        source: the run file.
        overrides: `section.key=value` strings.
        out: the run directory; default runs/NAME, numbered if it exists.
        view: shows the run; default the terminal.

    Raises:
        ConfigError: the run file is wrong, or `out` already holds a run.
        RollmillError: the run failed; the message says what to do.
        KeyboardInterrupt: the user interrupted the run; a checkpoint is written.
    """
    open_missing_streams()
    loaded = load_run(Path(source), overrides, None if out is None else Path(out))
    if loaded.config.mode not in ("both", "train"):
        raise ConfigError(f"{source}: mode `{loaded.config.mode}` is for the command `rollmill run`")
    return start(loaded, out, view)


def start(
    loaded: LoadedRun,
    out: str | Path | None,
    view: RunView | None,
    serving: Serving | None = None,
    attempt: RunAttempt | None = None,
    interrupts: Interrupts | None = None,
    callbacks: Sequence[Callback] = (),
) -> dict[str, Any]:
    """Start a loaded run in a new directory; see `run` and `execute`. `attempt` is given in the child of a
    supervisor."""
    require_usable_paths([loaded.out if out is None else out])
    run_dir = _folder(Path(out)) if out is not None else next_free_folder(loaded.out)
    with hold_run_lock(run_dir, owner=None if attempt is None else attempt.supervisor):
        explored = _require_fresh(run_dir, loaded)
        atomic_write(run_dir / CONFIG, loaded.to_yaml().encode(), durable=True)
        loaded, notes = (loaded, []) if attempt is None else attempt.begin(loaded, run_dir)
        return execute(
            loaded,
            run_dir,
            view,
            resumed=False,
            serving=serving,
            interrupts=interrupts,
            callbacks=callbacks,
            notes=[*explored, *notes],
        )


def resume(
    run_dir: str | Path,
    view: RunView | None = None,
    serving: Serving | None = None,
    attempt: RunAttempt | None = None,
    interrupts: Interrupts | None = None,
    callbacks: Sequence[Callback] = (),
    overrides: Sequence[str] = (),
) -> dict[str, Any]:
    """Resume an interrupted or killed run from its newest checkpoint; see `run` and `start`.

    Args:
        overrides: settings to change before, such as `steps=200`; see `change_settings`.
    """
    folder = Path(run_dir)
    if overrides:
        change_settings(folder, overrides)
    if not (folder / CONFIG).is_file():
        raise ConfigError(f"{folder} holds no run (no {CONFIG}); give the directory that `rollmill run` printed")
    if attempt is None:
        with hold_run_lock(folder):
            loaded = load_run(folder / CONFIG, out=folder)
            return execute(
                loaded, folder, view, resumed=True, serving=serving, interrupts=interrupts, callbacks=callbacks
            )
    with nullcontext() if attempt.locked else hold_run_lock(folder, owner=attempt.supervisor):
        loaded = load_run(folder / CONFIG, out=folder)
        if attempt.reduction != MemoryReduction():  # it halves what an earlier attempt has chosen
            loaded = with_kept_choice(loaded, read_machine(folder))
        loaded, notes = attempt.begin(loaded, folder)
        return execute(loaded, folder, view, resumed=True, serving=serving, notes=notes)


def evaluate(run_dir: str | Path, step: int | None = None, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Evaluate a checkpoint of a run (default: the newest) by the last stage with an evaluation.

    Returns step and the eval/ metrics. Raises ConfigError when no stage has an evaluation, CheckpointError when the
    step has no checkpoint.
    """
    folder = Path(run_dir)
    if not (folder / CONFIG).is_file():
        raise ConfigError(f"{folder} holds no run (no {CONFIG}); give a run directory")
    loaded = load_run(folder / CONFIG, out=folder)
    indices = [i for i, stage in enumerate(loaded.stages) if stage.evaluation is not None]
    if not indices:
        raise ConfigError(f"{folder / CONFIG} has no evaluation section; add evaluation.taskset to evaluate")
    loaded = load_run(folder / CONFIG, stage_overrides(loaded, indices[-1], overrides), out=folder)
    names = ("precision", "param_dtype", "threads")
    fixed = [key for key in overrides if key.partition("=")[0].rpartition(".")[2] in names]
    if fixed:
        raise ConfigError(f"--set {fixed[0]}: precision, param_dtype and threads are fixed for a run")
    steps = Checkpoints(folder).steps()
    if not steps or (step is not None and step not in steps):
        have = ", ".join(map(str, steps)) or "none"
        what = "checkpoint" if step is None else f"checkpoint of step {step}"
        raise CheckpointError(f"{folder} has no {what} to evaluate; it has: {have}")
    chosen = steps[-1] if step is None else step
    require_models(loaded.stages[indices[-1]])
    with verifying(Checkpoints(folder).path(chosen), model_files):
        setup = set_up_run(
            loaded, folder, chosen, trains=False
        )  # not in the event loop, so that Ctrl-C ends it at once
    return {"step": chosen, **asyncio.run(_evaluate(folder, setup, indices[-1], chosen))}


async def _evaluate(run_dir: Path, setup: RunSetup, index: int, step: int) -> dict[str, float]:
    stage = Stage(
        setup.loaded.stages[index],
        setup.policy,
        setup.tasks[index],
        setup.context(run_dir, Buffers(run_dir, setup.run_id, read_only=True)),
        index=index,
        first_version=step,
    )
    try:
        return (await stage.evaluate(is_complete=True)).metrics
    finally:
        await stage.close()
        close_warm_pools()


def execute(
    loaded: LoadedRun,
    run_dir: Path,
    view: RunView | None,
    *,
    resumed: bool,
    serving: Serving | None = None,
    explorers: ExplorerFleet | None = None,
    ranks: Sequence[dict[str, Any]] = (),
    interrupts: Interrupts | None = None,
    callbacks: Sequence[Callback] = (),
    notes: Sequence[str] = (),
) -> dict[str, Any]:
    """Run the remaining steps of a run and return the summary; see `run`.

    Args:
        explorers: the explorers of a run on Ray, in the process that trains; without, that process is started.
        ranks: how Ray starts the trainer's ranks, from rank 1.
        interrupts: further ways to end the run besides signals.
        callbacks: called between steps; not on Ray, where another process trains.
        notes: messages to show at the start.
    """
    if isinstance(loaded.config.placement, RayPlacement) and explorers is None:
        if callbacks:
            raise ConfigError(
                f"{loaded.path}: callbacks run in the process that trains, which `placement: ray` starts "
                "on its own; leave them out, or use placement: inline"
            )
        from rollmill.remote.supervisor import supervise  # starts a process that calls this function again

        return supervise(loaded, run_dir, view, execute, resumed=resumed)
    _require_start(loaded, run_dir if resumed else loaded.path, serving)
    with keep_heartbeat(run_dir, TRAINER_PROCESS) as heartbeat:
        checkpoints = Checkpoints(run_dir)
        with uncounted_work():
            point = load_start_point(loaded, run_dir, resumed=resumed)
        setup, start = point.setup, point.start
        loaded = setup.loaded
        plan = [(stage.name, stage.steps) for stage in loaded.stages]
        view = view or make_view(loaded.config.monitor.show_completions)
        monitor = Monitor(run_dir, loaded.config.name, plan, loaded.config.monitor, view)
        buffers = Buffers(run_dir, setup.run_id, shared=loaded.config.is_split)
        if loaded.config.mode == "train":
            explorers = JoinedExplorers(run_dir, setup.run_id, loaded.config.explorer_silent_s)
        shared = setup.context(run_dir, buffers)
        context = replace(shared, explorers=explorers, ranks=ranks, heartbeat=heartbeat)
        orchestrator = Orchestrator(
            context,
            loaded.config,
            loaded.stages,
            setup.policy,
            setup.tasks,
            monitor,
            RunControl(run_dir, loaded.config.changes, callbacks),
            resumed=start,
            serving=serving,
            interrupts=interrupts,
        )
        try:
            buffers.open_all(loaded.stages)
            monitor.message(setup.describe(run_dir))
            for message in setup.messages:
                monitor.message(message)
            for message in point.messages:
                monitor.incident(message)
            for message in notes:
                monitor.message(message)
            if resumed:
                monitor.resume_at(point.step)
            else:
                monitor.open_trackers()
            summary = asyncio.run(orchestrator.run())
        except Interrupted:
            if ends_for_restart():
                monitor.close(None)
                raise KeyboardInterrupt from None
            again = f"resume {run_dir}" if serving is None else f"serve {run_dir} --train"
            summary = summarise(orchestrator.state, [stage.name for stage in loaded.stages], checkpoints, "interrupted")
            monitor.message(f"interrupted after step {orchestrator.state.step}; go on with: rollmill {again}")
            monitor.close(summary)
            raise KeyboardInterrupt from None
        except SystemExit as error:
            monitor.close(None)
            raise UserExitError.of(error) from error
        except BaseException:
            monitor.close(None)
            raise
        finally:
            buffers.close()
            close_warm_pools()
        monitor.close(summary)
        return summary


def _require_start(loaded: LoadedRun, source: Path, serving: Serving | None) -> None:
    """Raise ConfigError for a run that has to be served (`source`: by this command), or lacks a tracker's library."""
    if serving is None and any(isinstance(stage.workflow, LiveRequestsWorkflow) for stage in loaded.stages):
        raise ConfigError(
            f"{loaded.path}: workflow `live_requests` waits for an application: start it by `rollmill serve {source} "
            "--train`"
        )
    require_extras(loaded, "monitor")


def _folder(path: Path) -> Path:
    if os.path.exists(path) and not path.is_dir():
        raise ConfigError(f"{path} is a file; choose another folder with --out")
    return path


def _require_fresh(folder: Path, loaded: LoadedRun) -> list[str]:
    """Prepare the directory of a new run; one that failed before its first result may be reused, and one whose buffer
    was filled without a trainer is gone on with. Returns messages for the start.

    Raises ConfigError where the directory holds a run with results, or groups that the run would not find.
    """
    explored = count_explored(folder)
    stage = next((each for each in loaded.stages if each.algorithm.uses_rollouts), None)
    if explored and stage and not stage.buffer.in_database(stage.persistent or loaded.config.is_split):
        text = (
            f"{folder} has {explored} groups that were rolled out without a trainer, and this run's buffer is in memory"
        )
        raise ConfigError(f"{text}; set buffer.store: sql or mode: train, or choose another --out")
    if (folder / CONFIG).exists() and (read_metrics(folder) or Checkpoints(folder).steps()):
        raise ConfigError(
            f"{folder} already holds a run; go on with it by `rollmill resume {folder}`, or choose another --out"
        )
    files = (*(() if explored else (MACHINE,)), EVENTS_FILE, CHANGES_FILE, SCALE_REQUEST, SCALE_ANSWER)
    for left in (*(folder / name for name in files), *folder.glob("stall-*.txt"), *folder.glob("crash-*.txt")):
        left.unlink(missing_ok=True)
    shutil.rmtree(folder / PROCESSES, ignore_errors=True)
    return [f"{explored} groups in the buffer were rolled out without a trainer"] if explored else []


def next_free_folder(folder: Path) -> Path:
    """The folder, or the first of FOLDER-2, FOLDER-3 ... that holds no run."""
    number, candidate = 1, folder
    while os.path.exists(candidate / CONFIG) or is_run_locked(candidate):
        number += 1
        candidate = folder.with_name(f"{folder.name}-{number}")
    return candidate
