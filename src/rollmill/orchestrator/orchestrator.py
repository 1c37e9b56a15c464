"""The orchestrator: runs the stages of a run one after the other, with what happens around their steps.

Components never call the orchestrator.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any

from rollmill.config.run import RunConfig, StageConfig
from rollmill.errors import CallbackError, DeadlineError, is_recoverable
from rollmill.models.load import PolicyModel
from rollmill.orchestrator.checkpointing import Checkpointing
from rollmill.orchestrator.context import RunContext
from rollmill.orchestrator.evaluation_schedule import EvaluationSchedule
from rollmill.orchestrator.extension import FINISHED, reopened_stage
from rollmill.orchestrator.interrupt import Interrupted, Interrupts
from rollmill.orchestrator.loop import train
from rollmill.orchestrator.loop_callback import LoopCallback
from rollmill.orchestrator.mismatch_alarm import MismatchAlarm
from rollmill.orchestrator.missing_verdicts import MissingVerdicts
from rollmill.orchestrator.monitor import Monitor
from rollmill.orchestrator.run_control import RunControl
from rollmill.orchestrator.stages import Stage
from rollmill.orchestrator.state import RunState
from rollmill.orchestrator.step_recorder import StepRecorder
from rollmill.orchestrator.stuck_run import StuckDetector
from rollmill.orchestrator.summary import summarise
from rollmill.orchestrator.task_selection import StageTasks
from rollmill.progress import reach_step
from rollmill.trackers.rollout_log import RolloutLog

EVALUATIONS = "evaluations"
Serving = Callable[[Stage], AbstractAsyncContextManager[None]]
"""Serves a stage's policy to an application while it is trained."""


class Orchestrator:
    """Runs the stages of a run in this process.

    Args:
        resumed: a checkpoint's state, and the trainer's state.

    Attributes:
        state: progress of the run.
    """

    def __init__(
        self,
        context: RunContext,
        config: RunConfig,
        stages: list[StageConfig],
        policy: PolicyModel,
        tasks: list[StageTasks],
        monitor: Monitor,
        control: RunControl,
        *,
        resumed: tuple[RunState, dict[str, Any]] | None = None,
        serving: Serving | None = None,
        interrupts: Interrupts | None = None,
    ) -> None:
        self._context, self._stages, self._policy, self._tasks = context, stages, policy, tasks
        self._monitor, self._control, self._serving = monitor, control, serving
        self._interrupts = interrupts or Interrupts()
        self.state, self._trainer = resumed or (RunState(), dict[str, Any]())
        self._is_resumed = resumed is not None
        self._evaluations = RolloutLog(context.run_dir / EVALUATIONS)
        self._checkpointing = Checkpointing(context, config, policy, self.state, monitor, control, self._evaluations)
        evaluation = EvaluationSchedule(
            config, stages, self.state, monitor, control, self._evaluations, self._checkpointing
        )
        # In this order: the recorder counts the step for those after it, and only a step with its records is stored.
        self._callbacks: list[LoopCallback] = [
            evaluation,
            StepRecorder(self.state, monitor, evaluation, self._checkpointing),
            MissingVerdicts(monitor),
            MismatchAlarm(context.precision, monitor, stops=config.monitor.stop_on_mismatch),
            StuckDetector(stages, config.monitor, monitor),
            control,
            self._checkpointing,
        ]

    async def run(self) -> dict[str, Any]:
        """Run the remaining steps and return the summary.

        Raises:
            Interrupted: the user asked to stop; a checkpoint of the last step is written.
            RollmillError: whatever stopped the run.
        """
        if self._is_resumed:
            self._reopen()
            reach_step(self.state.step)
            self._checkpointing.prune()
        self._evaluations.drop_after(self.state.step)
        explorers = self._context.explorers
        async with nullcontext() if explorers is None else explorers.serving(self._monitor.message):
            with self._interrupts.installed(), self._monitor.showing_outages():
                while self.state.stage < len(self._stages):
                    await self._stage(self._stages[self.state.stage])
        return summarise(self.state, [stage.name for stage in self._stages], self._checkpointing.checkpoints)

    def _reopen(self) -> None:
        """Go back into the last stage of a finished run that has got more steps."""
        if self.state.stage < len(self._stages):
            return
        stage = reopened_stage(self._trainer, self._stages)
        self._trainer.pop(FINISHED)
        if stage is not None:
            self.state.stage, self.state.current = len(self._stages) - 1, stage

    async def _stage(self, config: StageConfig) -> None:
        first_version = self.state.step - self.state.current.step
        tasks, index = self._tasks[self.state.stage], self.state.stage
        stage = Stage(config, self._policy, tasks, self._context, index=index, first_version=first_version)
        try:
            if self._trainer:
                stage.restore(self.state.current, self._trainer)
                self._trainer.clear()  # copies of the stage's new state
            else:
                stage.begin(self.state.current.stores)
                for text in stage.describe():
                    self._monitor.message(text)
            self.state.current = stage.state
            self._control.begin(stage)
            async with nullcontext() if self._serving is None else self._serving(stage):
                try:
                    await train(stage, self._callbacks, self._interrupts)
                except Exception as error:
                    # else the weights are those of no step, or of one that has no number and no records yet
                    whole = not stage.updating and self.state.step == stage.version
                    if whole and (isinstance(error, Interrupted | CallbackError) or is_recoverable(error)):
                        await self._checkpointing.save_after(error, stage)
                    raise
                await self._checkpointing.finish_stage(stage, is_last=config is self._stages[-1])
        except DeadlineError as error:
            raise stage.backend.explain(error) from error.__cause__  # it may be the same one
        finally:
            await stage.close()
