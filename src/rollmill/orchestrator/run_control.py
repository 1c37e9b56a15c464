"""Callbacks of a run, and what they may change while it trains: learning rate, weights of rewards, its end.

Every change takes effect at a step boundary and is recorded in changes.jsonl, so a resumed run makes it again, and
another run can repeat it (`changes` of the run file).
"""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from rollmill.config.changes import ChangeConfig
from rollmill.errors import CallbackError, ConfigError, RollmillError
from rollmill.files import explain_write_errors
from rollmill.orchestrator.loop_callback import LoopCallback, TrainingStep
from rollmill.trackers.metrics_log import Metrics, read_jsonl_rows
from rollmill.types import Experience

if TYPE_CHECKING:
    from rollmill.orchestrator.stages import Stage

CHANGES_FILE = "changes.jsonl"


class Callback:
    """Base of callbacks: a subclass overrides what it wants to hear of.

    The methods are called in the process that trains, between two steps, so a slow one delays the run. `run` changes
    it. An exception ends the run with a checkpoint.
    """

    def on_step(self, run: RunControl, metrics: Metrics) -> None:
        """Called after each training step, with its line of metrics.jsonl. Changes hold from the next step on."""

    def on_rollouts(self, run: RunControl, experiences: Sequence[Experience]) -> None:
        """Called before `on_step` with what the step has learned from."""

    def on_evaluation(self, run: RunControl, metrics: Metrics) -> None:
        """Called after an evaluation, which may run beside the next step. Changes are made after that step."""

    def on_checkpoint(self, run: RunControl, folder: Path) -> None:
        """Called when a checkpoint is complete. Changes are made after the next step."""


class RunControl(LoopCallback):
    """Changes a run while it trains.

    Args:
        planned: `changes` of the run file.
        callbacks: called in this order.

    Attributes:
        run_dir: the run directory.
    """

    def __init__(self, run_dir: Path, planned: Sequence[ChangeConfig] = (), callbacks: Sequence[Callback] = ()) -> None:
        self.run_dir = run_dir
        self._path = run_dir / CHANGES_FILE
        recorded = [ChangeConfig.model_validate(row) for row in read_jsonl_rows(self._path)]
        self._changes = [*planned, *recorded]
        self._recorded_until = max((each.step for each in recorded), default=0)
        self._callbacks = tuple(callbacks)
        self._current: Stage | None = None
        self._boundary = 1  # step after which changes made now take effect

    # -- for callbacks -----------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Training steps of the whole run so far."""
        return self._stage.version

    @property
    def stage(self) -> str:
        """Name of the current stage."""
        return self._stage.config.name

    def stop(self) -> None:
        """End the stage after this step, like early stopping; a run of one stage is then done."""
        self._change(stop=True)

    def set_learning_rate(self, lr: float) -> None:
        """Change `trainer.lr`, the peak of the schedule. Raises ConfigError if it is not above 0."""
        self._change(lr=lr)

    def set_reward_weight(self, name: str, weight: float) -> None:
        """Change the weight of a reward, by its name in the metrics (`exact`, or the name of the function).

        Raises ConfigError if there is no such reward, or its weight cannot change during this run.
        """
        stage = self._stage
        if stage.context.explorers is not None:
            raise ConfigError("rewards are computed by explorers in other processes, where weights cannot change")
        if getattr(getattr(stage.config.algorithm, "advantage", None), "uses_parts", False):
            raise ConfigError(
                f"algorithm `{stage.config.algorithm.name}` weighs the rewards itself; their weights cannot change"
            )
        known = [] if stage.rewards is None else stage.rewards.names
        if name not in known:
            raise ConfigError(f"no reward `{name}`; there are {', '.join(f'`{each}`' for each in known) or 'none'}")
        self._change(rewards={name: weight})

    # -- for the orchestrator ----------------------------------------------------------------------------------

    def begin(self, stage: Stage) -> None:
        """Take over a stage that begins, or that was restored: the changes that it had are made again."""
        self._current, self._boundary = stage, stage.version + 1
        for change in self._changes:
            if stage.first_version < change.step <= stage.version:
                self._apply(change)  # but for a stop: a checkpoint says itself whether its stage has ended

    async def after_step(self, stage: Stage, step: TrainingStep) -> None:
        """Call the callbacks of a finished step, then make the changes that are due.

        Raises CallbackError if a callback raises.
        """
        self._boundary = stage.version
        self._call("on_rollouts", step.experiences)
        self._call("on_step", step.metrics)
        for change in self._changes:
            if change.step == stage.version:
                self._apply(change)
                stage.state.stopped |= change.stop
        self._boundary = stage.version + 1

    def evaluated(self, metrics: Metrics) -> None:
        """Call the callbacks of a finished evaluation. Raises CallbackError."""
        self._call("on_evaluation", metrics)

    def checkpointed(self, folder: Path) -> None:
        """Call the callbacks of a complete checkpoint. Raises CallbackError."""
        self._call("on_checkpoint", folder)

    @property
    def _stage(self) -> Stage:
        if self._current is None:
            raise ConfigError("the run has not begun yet; change it in a callback")
        return self._current

    def _call(self, method: str, value: Any) -> None:
        for callback in self._callbacks:
            call: Callable[[RunControl, Any], None] = getattr(callback, method)
            try:
                call(self, value)
            except (Exception, SystemExit) as error:  # a user's code may raise anything
                frame = traceback.extract_tb(error.__traceback__)[-1]
                where = f"{type(callback).__name__}.{method}"
                what = f"{type(error).__name__}: {error}" if not isinstance(error, RollmillError) else str(error)
                text = f"callback `{where}` failed after step {self.step}: {what} ({frame.filename}:{frame.lineno})"
                raise CallbackError(text) from error

    def _change(self, **what: Any) -> None:
        """Record a change, unless a recorded run is being repeated: then its own changes are made."""
        try:
            change = ChangeConfig.model_validate({"step": self._boundary, **what})
        except ValidationError as error:
            first = error.errors()[0]
            raise ConfigError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error
        if self._boundary <= self._recorded_until:
            return
        line = json.dumps(change.model_dump(exclude_defaults=True)) + "\n"
        with explain_write_errors(self._path), self._path.open("ab+") as file:
            size = file.seek(0, os.SEEK_END)
            if size and os.pread(file.fileno(), 1, size - 1) != b"\n":  # a killed process left half a line
                file.truncate(os.pread(file.fileno(), size, 0).rfind(b"\n") + 1)
            file.write(line.encode())
            file.flush()
            os.fsync(file.fileno())  # a checkpoint after it relies on it
        self._changes.append(change)

    def _apply(self, change: ChangeConfig) -> None:
        stage = self._stage
        if change.lr is not None:
            stage.trainer.set_learning_rate(change.lr)
        if change.rewards and stage.rewards is not None:
            ahead = 1 if stage.config.max_staleness else 0  # others of this version may have been scored already
            for name, weight in change.rewards.items():
                stage.rewards.set_weight(name, weight, change.step + ahead)
