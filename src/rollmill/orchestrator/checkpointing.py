"""Writes the checkpoints of a run: every few steps, of the best weights, and of the last step before it ends."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import Any

from rollmill.config.run import RunConfig
from rollmill.models.load import PolicyModel
from rollmill.orchestrator.checkpoint import Checkpoints
from rollmill.orchestrator.context import RunContext
from rollmill.orchestrator.extension import finished_entry
from rollmill.orchestrator.interrupt import Interrupted
from rollmill.orchestrator.loop_callback import LoopCallback, TrainingStep
from rollmill.orchestrator.monitor import Monitor
from rollmill.orchestrator.run_control import RunControl
from rollmill.orchestrator.stages import Stage
from rollmill.orchestrator.state import RunState, StageState
from rollmill.progress import uncounted_work
from rollmill.trackers.rollout_log import RolloutLog

_LAST_CHECKPOINT_S = 60.0


class Checkpointing(LoopCallback):
    """Writes a checkpoint after every `checkpoint.every` steps, and others when it is told to.

    Args:
        evaluations: flushed to the disk before each checkpoint, as are the records of `monitor`.
    """

    def __init__(
        self,
        context: RunContext,
        config: RunConfig,
        policy: PolicyModel,
        state: RunState,
        monitor: Monitor,
        control: RunControl,
        evaluations: RolloutLog,
    ) -> None:
        self.checkpoints = Checkpoints(context.run_dir)
        self._context, self._config, self._policy, self._state = context, config, policy, state
        self._monitor, self._control, self._evaluations = monitor, control, evaluations
        self._seconds, self._counted_until = 0.0, 0.0

    async def on_stage_begin(self, stage: Stage) -> None:
        self._counted_until = time.perf_counter()

    async def after_step(self, stage: Stage, step: TrainingStep) -> None:
        if not stage.done and (self.is_best() or stage.state.step % self._config.checkpoint.every == 0):
            await self.save(stage)

    def is_best(self) -> bool:
        """True if the current weights have the best evaluation so far, and checkpoint.keep_best is set."""
        return bool(self._config.checkpoint.keep_best) and self._state.best_step == self._state.step

    async def save(self, stage: Stage) -> None:
        """Write a checkpoint of the last step boundary, unless there is one."""
        if self._state.step in self.checkpoints.steps():
            return
        began = time.perf_counter()
        self._state.current = await stage.snapshot()
        self._write(stage.trainer_state(), stage)
        self._seconds += time.perf_counter() - began

    async def save_after(self, error: Exception, stage: Stage) -> None:
        """Write the checkpoint of the last step before an error ends the run: after a failure only if that is possible.

        Raises what an interrupted run's checkpoint raises.
        """
        try:
            async with asyncio.timeout(None if isinstance(error, Interrupted) else _LAST_CHECKPOINT_S):
                await self.save(stage)
        except Exception as failure:
            if isinstance(error, Interrupted):
                raise
            error.add_note(f"no checkpoint of step {self._state.step} could be written: {failure}")

    async def finish_stage(self, stage: Stage, *, is_last: bool) -> None:
        """Write the checkpoint at the end of a stage. The next one starts from its weights with a fresh optimizer; from
        the last one `rollmill resume --set steps=N` goes on."""
        kept: dict[str, Any] = {}
        if is_last:
            await stage.snapshot()
            kept = stage.trainer_state() | finished_entry(stage.state, stage.config)
        else:
            stage.trainer.gather_policy()  # what the next stage trains
        self._state.stage += 1
        self._state.current = StageState(stores=stage.state.stores)
        self._write(kept, stage)

    def take_seconds(self) -> float:
        """Return the seconds that checkpoints have taken since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def prune(self) -> None:
        """Remove checkpoints that are not kept; a run killed between writing and pruning does it when resumed."""
        config = self._config.checkpoint
        best = self._state.best_step if config.keep_best else None
        self.checkpoints.prune(config.keep_last, [] if best is None else [best])

    @uncounted_work()
    def _write(self, trainer: dict[str, Any], stage: Stage) -> None:
        state = self._state
        now, name = time.perf_counter(), stage.config.name
        state.seconds[name] = state.seconds.get(name, 0.0) + now - self._counted_until
        self._counted_until = now
        self._context.set_activity(f"write the checkpoint of step {state.step}")
        weights = stage.load_for_export()
        self._monitor.sync()  # a checkpoint that survives a power failure needs the records of its steps
        self._evaluations.sync()
        policy, machine = self._policy, self._context.machine
        export = partial(stage.trainer.export, policy=policy)
        model, tokenizer = policy.model, policy.tokenizer
        self.checkpoints.write(state.step, model, tokenizer, state.to_json(), trainer, machine, export, weights)
        self.prune()
        self._control.checkpointed(self.checkpoints.path(state.step))
