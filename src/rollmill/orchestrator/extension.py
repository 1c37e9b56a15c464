"""Changes settings of a run between two starts: more steps for a finished or stopped run, and what cannot make it
inconsistent."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rollmill.config.loader import LoadedRun, load_run
from rollmill.config.run import StageConfig
from rollmill.config.yaml_file import write_yaml
from rollmill.errors import CheckpointError, ConfigError
from rollmill.files import atomic_write
from rollmill.orchestrator.checkpoint import Checkpoints, read_state
from rollmill.orchestrator.manifest import STATE
from rollmill.orchestrator.state import RunState, StageState
from rollmill.supervision.run_lock import hold_run_lock
from rollmill.trackers.event_log import CHANGED, record_event

FINISHED = "finished"
"""Key of a last checkpoint's trainer state: the state of the last stage at its end, and the steps that it had to do."""
_CONFIG = "config.yaml"
_STAGE = re.compile(r"stages\.(\d+)\.")
_LR = "trainer.lr"
_SAFE = re.compile(
    r"(steps|evaluation\.every|trainer\.(lr|micro_batch_tokens|gradient_checkpointing)|explorer_silent_s|trainer_away_s"
    r"|(early_stop|checkpoint|monitor|supervise|offload)(\..+)?)"
)
_SAFE_TEXT = (
    "steps, trainer.lr, evaluation.every, early_stop, checkpoint, monitor, supervise, offload, "
    "trainer.micro_batch_tokens, trainer.gradient_checkpointing, explorer_silent_s and trainer_away_s"
)


def change_settings(run_dir: Path, overrides: Sequence[str]) -> list[str]:
    """Changes the settings of a run that is not running, in its config.yaml, and records them as an event.

    A new learning rate becomes an entry of `changes`, so that config.yaml says from which step on it holds.

    Args:
        overrides: `section.key=value` strings. `steps=N` of a run with several stages concerns its last one.

    Returns the changes in words.

    Raises:
        ConfigError: there is no run, another process runs it, a value is wrong, a change would make the run
            inconsistent, or a stage has made more steps already.
        CheckpointError: the newest checkpoint cannot be read.
    """
    path = run_dir / _CONFIG
    if not path.is_file():
        raise ConfigError(f"{run_dir} holds no run (no {_CONFIG}); give the directory that `rollmill run` printed")
    with hold_run_lock(run_dir):
        before = load_run(path, out=run_dir)
        last = len(before.stages) - 1
        given = [f"stages.{last}.{each}" if before.config.stages and _is_steps(each) else each for each in overrides]
        after = load_run(path, given, out=run_dir)
        old, new = (dict(iter_settings(each.resolved())) for each in (before, after))
        changed = {key: (old.get(key), new.get(key)) for key in {**old, **new} if old.get(key) != new.get(key)}
        if unsafe := [key for key in changed if not _SAFE.fullmatch(_STAGE.sub("", key, count=1))]:
            raise _inconsistent(run_dir, unsafe[0])
        if not changed:
            return []
        state = _newest_state(run_dir)
        _require_steps_ahead(after.stages, state, run_dir)
        whole = after.resolved()
        for key, (was, value) in changed.items():
            if _STAGE.sub("", key, count=1) == _LR and state is not None:
                _change_rate_from(state, before, key, was, value, whole)
        atomic_write(path, write_yaml(whole).encode(), durable=True)
        words = [f"{key} {json.dumps(was)} -> {json.dumps(value)}" for key, (was, value) in changed.items()]
        record_event(run_dir, CHANGED, step=0 if state is None else state.step, changes=words)
    return words


def finished_entry(state: StageState, config: StageConfig) -> dict[str, Any]:
    """Builds what a last checkpoint remembers about its stage, for a run that is extended later."""
    return {FINISHED: json.dumps({"state": asdict(state), "steps": config.steps})}  # torch.load takes plain types


def reopened_stage(trainer: dict[str, Any], stages: Sequence[StageConfig]) -> StageState | None:
    """Returns the last stage's state if it has more steps to do than when it ended; None if the run is done.

    Args:
        trainer: the trainer state of a run's last checkpoint.
    """
    finished = json.loads(trainer[FINISHED])
    if finished["steps"] >= stages[-1].steps:
        return None
    return StageState(**finished["state"] | {"stopped": False})


def iter_settings(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yields the plain values of settings with their keys, such as trainer.lr; a list of plain values is one value."""
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from iter_settings(inner, (*path, str(key)))
    elif isinstance(value, list) and any(isinstance(each, Mapping | list) for each in value):
        for number, inner in enumerate(value):
            yield from iter_settings(inner, (*path, str(number)))
    else:
        yield ".".join(path), value


def _is_steps(override: str) -> bool:
    return override.partition("=")[0].strip() == "steps"


def _newest_state(run_dir: Path) -> RunState | None:
    checkpoints = Checkpoints(run_dir)
    if not (steps := checkpoints.steps()):
        return None
    path = checkpoints.path(steps[-1]) / STATE
    try:
        return read_state(checkpoints.path(steps[-1]))
    except (OSError, ValueError, TypeError, KeyError) as error:
        text = (
            f"cannot read {path}: {error}; `rollmill resume {run_dir}` without --set moves a damaged checkpoint aside"
        )
        raise CheckpointError(text) from error


def _require_steps_ahead(stages: Sequence[StageConfig], state: RunState | None, run_dir: Path) -> None:
    """Raises ConfigError if a stage would have to do fewer steps than it has made."""
    if state is None:
        return
    done = {state.stage: state.current.step}
    if state.stage >= len(stages):
        done = {len(stages) - 1: state.step - sum(stage.steps for stage in stages[:-1])}
    for index, steps in done.items():
        if stages[index].steps < steps:
            raise ConfigError(
                f"--set steps={stages[index].steps}: stage {stages[index].name} has made {steps} steps already; give "
                f"more, or take an earlier checkpoint of {run_dir} as model.path of a new run"
            )


def _change_rate_from(state: RunState, run: LoadedRun, key: str, was: Any, value: Any, whole: dict[str, Any]) -> None:
    """Turns a new learning rate of the stage that goes on into an entry of `changes`; one of a later stage is kept."""
    match = _STAGE.match(key)
    index, current = int(match[1]) if match else 0, min(state.stage, len(run.stages) - 1)
    if index < current:
        raise ConfigError(f"--set {key}: stage {run.stages[index].name} is over; set the rate of a stage that goes on")
    done = state.current.step if state.stage == current else state.step
    if index > current or not done:
        return
    section = whole["stages"][index] if match else whole
    section["trainer"]["lr"] = was
    whole["changes"] = [*whole.get("changes", []), {"step": state.step, "lr": value}]


def _inconsistent(run_dir: Path, key: str) -> ConfigError:
    return ConfigError(
        f"--set {key}: a run that has begun keeps this setting, since steps before and after the change would not be "
        f"of one run; what may change is {_SAFE_TEXT}. Start a new run from its weights instead: `rollmill run "
        f"{run_dir / _CONFIG} --set model.path={run_dir}/checkpoints/step-N --set {key}=...`"
    )
