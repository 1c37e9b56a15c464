"""The orchestrator: builds the components of each stage, runs its training loop, evaluates, checkpoints, resumes.

Components never call the orchestrator.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any

from rollmill.config.run import RunConfig, StageConfig
from rollmill.errors import CallbackError, DeadlineError, is_recoverable
from rollmill.models.load import PolicyModel
from rollmill.orchestrator.checkpoint import Checkpoints
from rollmill.orchestrator.context import RunContext
from rollmill.orchestrator.evaluation import EvaluationResult
from rollmill.orchestrator.extension import FINISHED, finished_entry, reopened_stage
from rollmill.orchestrator.interrupt import Interrupted, Interrupts
from rollmill.orchestrator.loop import TrainingLoop, TrainingStepResult
from rollmill.orchestrator.mismatch_alarm import MismatchAlarm
from rollmill.orchestrator.missing_verdicts import MissingVerdicts
from rollmill.orchestrator.monitor import Monitor
from rollmill.orchestrator.run_control import RunControl
from rollmill.orchestrator.stages import Stage
from rollmill.orchestrator.state import RunState, StageState
from rollmill.orchestrator.stuck_run import StuckDetector
from rollmill.orchestrator.summary import summarise
from rollmill.orchestrator.task_selection import StageTasks
from rollmill.progress import reach_step, uncounted_work
from rollmill.trackers.rollout_log import RolloutLog

EVALUATIONS = "evaluations"
_LAST_CHECKPOINT_S = 60.0
Note = Callable[[], Awaitable[None]]
"""Waits for a running evaluation and records it."""
Serving = Callable[[Stage], AbstractAsyncContextManager[None]]
"""Serves a stage's policy to an application while it is trained."""


class Orchestrator:
    """Runs the stages of a run in this process."""

    def __init__(
        self,
        context: RunContext,
        config: RunConfig,
        stages: list[StageConfig],
        policy: PolicyModel,
        tasks: list[StageTasks],
        monitor: Monitor,
        *,
        serving: Serving | None = None,
        interrupts: Interrupts | None = None,
        control: RunControl | None = None,
    ) -> None:
        self._context = context
        self._config = config
        self._stages = stages
        self._policy = policy
        self._tasks = tasks
        self._monitor = monitor
        self._serving = serving
        self._checkpoints = Checkpoints(context.run_dir)
        self._evaluations = RolloutLog(context.run_dir / EVALUATIONS)
        self._interrupts = interrupts or Interrupts()
        self._control = control or RunControl(context.run_dir, config.changes)
        self._checkpoint_seconds = 0.0
        self._missing_verdicts = MissingVerdicts()
        self._stuck = StuckDetector(stages, config.monitor)
        self._mismatch = MismatchAlarm(context.precision, stops=config.monitor.stop_on_mismatch)
        self.state = RunState()

    async def run(self, resumed: tuple[RunState, dict[str, Any]] | None = None) -> dict[str, Any]:
        """Run the remaining steps and return the summary. `resumed` is a checkpoint's state and trainer state.

        Raises:
            Interrupted: the user asked to stop; a checkpoint of the last step is written.
            RollmillError: whatever stopped the run.
        """
        trainer: dict[str, Any] = {}
        if resumed is not None:
            self.state, trainer = resumed
            trainer = self._reopen(trainer)
            reach_step(self.state.step)
            self._prune()
        self._evaluations.drop_after(self.state.step)
        explorers = self._context.explorers
        async with nullcontext() if explorers is None else explorers.serving(self._monitor.message):
            with self._interrupts.installed(), self._monitor.showing_outages():
                while self.state.stage < len(self._stages):
                    await self._stage(self._stages[self.state.stage], trainer)
                    trainer = {}
        return summarise(self.state, [stage.name for stage in self._stages], self._checkpoints)

    def _reopen(self, trainer: dict[str, Any]) -> dict[str, Any]:
        """Go back into the last stage of a finished run that has got more steps. Returns the trainer state of the
        stage that goes on."""
        if self.state.stage < len(self._stages):
            return trainer
        stage = reopened_stage(trainer, self._stages)
        if stage is None:
            return {}
        self.state.stage, self.state.current = len(self._stages) - 1, stage
        return {key: value for key, value in trainer.items() if key != FINISHED}

    async def _stage(self, config: StageConfig, trainer: dict[str, Any]) -> None:
        stage = Stage(
            config,
            self._policy,
            self._tasks[self.state.stage],
            self._context,
            index=self.state.stage,
            first_version=self.state.step - self.state.current.step,
        )
        try:
            if trainer:
                stage.restore(self.state.current, trainer)
                trainer.clear()  # copies of the stage's new state
            else:
                stage.begin(self.state.current.stores)
                for text in stage.describe():
                    self._monitor.message(text)
            self.state.current = stage.state
            self._control.begin(stage)
            async with nullcontext() if self._serving is None else self._serving(stage):
                await self._train(config, TrainingLoop(stage))
        except DeadlineError as error:
            raise stage.backend.explain(error) from error.__cause__  # it may be the same one
        finally:
            await stage.close()

    async def _train(self, config: StageConfig, loop: TrainingLoop) -> None:
        stage, state, started = loop.stage, loop.stage.state, time.perf_counter()
        before = self._stages[self.state.stage - 1] if self.state.stage else config
        if state.step == 0 and _evaluation_key(before) != _evaluation_key(config):
            self.state.best_value = self.state.best_step = None  # another metric: not comparable
        try:
            await self._evaluate_before(config, stage)
            while state.step < config.steps and not state.stopped:
                await self._one_step(config, loop)
                started = self._clock(config.name, started)
        except Exception as error:
            if isinstance(error, Interrupted | CallbackError) or (is_recoverable(error) and not loop.updates):
                self._clock(config.name, started)
                await self._save_last_step(stage, error)
            raise
        kept: dict[str, Any] = {}  # the next stage starts from these weights, with a fresh optimizer
        if config is self._stages[-1]:  # `rollmill resume --set steps=N` goes on from here
            await stage.snapshot()
            kept = stage.trainer_state() | finished_entry(state, config)
        self.state.stage += 1
        self.state.current = StageState(stores=state.stores)
        self._write(kept, stage)

    async def _save_last_step(self, stage: Stage, error: Exception) -> None:
        """Write the checkpoint of the last step, if it has none: after a failure only if that is possible."""
        if self.state.step in self._checkpoints.steps():
            return
        try:
            async with asyncio.timeout(None if isinstance(error, Interrupted) else _LAST_CHECKPOINT_S):
                await self._checkpoint(stage)
        except Exception as failure:
            if isinstance(error, Interrupted):
                raise
            error.add_note(f"no checkpoint of step {self.state.step} could be written: {failure}")

    async def _evaluate_before(self, config: StageConfig, stage: Stage) -> None:
        """Evaluate before the next step what is still due: the weights that the stage starts with, unless the stage
        before has just run the same evaluation, or those of a checkpoint that was written when their evaluation failed.
        """
        done = [(each["step"], each["stage"]) for each in self.state.evaluations]
        if not _is_evaluated_alone(config, stage.state.step) or (self.state.step, config.name) in done:
            return  # also if the run was interrupted between the evaluation and the first step
        if stage.state.step == 0 and _already_evaluated(self.state, self._stages, config):
            return
        metrics = await self._interrupts.guard(self._evaluate(config, stage))
        self._monitor.evaluation({"step": self.state.step, **metrics})

    def _is_due(self, config: StageConfig, stage: Stage) -> bool:
        """True to evaluate the current weights while the next step rolls out.

        A resumed run repeats the evaluation that was due at its checkpoint, beside the same rollouts, so it computes
        the same as an uninterrupted run. Some stages are evaluated alone, before the next step.
        """
        if config.evaluation is None or config.evaluates_exclusively:
            return False
        if stage.state.step == 0:
            return config.evaluation.at_start and not _already_evaluated(self.state, self._stages, config)
        return stage.state.step % config.evaluation.every == 0

    async def _step(self, config: StageConfig, loop: TrainingLoop) -> tuple[TrainingStepResult, Note | None]:
        """Make the next step of the stage, with an evaluation of the current weights beside it if one is due.

        Nothing is awaited after the update, so an interrupted step is either made or not. Also returns the coroutine
        function that records the evaluation, if that is still to be done.
        """
        stage = loop.stage
        if not self._is_due(config, stage):
            return await loop.step(), None
        assert stage.evaluator is not None
        stage.sync_weights()
        evaluation, noted = stage.evaluator.begin(), False

        async def note() -> None:
            nonlocal noted
            with stage.trace.enter_phase("eval", "rewards of the evaluation"):
                found = await evaluation.result()
            self._note(config, stage, found)
            self._monitor.evaluation({"step": self.state.step, **found.metrics})
            noted = True
            if stage.state.step > 0 and self._is_best():
                await self._timed_checkpoint(stage)

        async def before_update() -> None:
            with stage.trace.enter_phase("eval", "completions of the evaluation"):
                await evaluation.generated()
            if self._config.checkpoint.keep_best or stage.offloader is not None:
                await note()

        try:
            return await loop.step(before_update), None if noted else note
        except BaseException:
            await evaluation.cancel()
            raise

    async def _one_step(self, config: StageConfig, loop: TrainingLoop) -> None:
        stage = loop.stage
        result, note = await self._interrupts.guard(self._step(config, loop))
        if note is not None:
            await note()
        self.state.step = stage.version
        self.state.generated_tokens += result.generated_tokens
        self.state.generation_seconds += result.seconds.get("rollout", 0.0)
        metrics = {"step": self.state.step, "stage": config.name, "version": stage.version, **result.metrics}
        metrics["tokens_per_second"] = (result.generated_tokens or result.metrics["tokens"]) / result.seconds["total"]
        metrics |= {f"seconds/{phase}": seconds for phase, seconds in result.seconds.items()}
        metrics["seconds/checkpoint"], self._checkpoint_seconds = self._checkpoint_seconds, 0.0
        if _is_evaluated_alone(config, stage.state.step):
            began = time.perf_counter()
            try:
                metrics |= await self._evaluate(config, stage)
            except Exception:  # a checkpoint of this step may follow, and a resumed run repeats the evaluation only
                self._monitor.step(metrics, result.experiences, result.began, result.spans)
                raise
            metrics["seconds/eval"] = time.perf_counter() - began
        # metrics before the checkpoint: a run killed in between repeats the step and drops these metrics
        self._monitor.step(metrics, result.experiences, result.began, result.spans)
        reach_step(self.state.step)
        for warning in self._missing_verdicts.check(config, result.experiences):
            self._monitor.message(warning)
        self._mismatch.check(config, metrics, self._monitor)
        stage.state.stopped |= self._stuck.report(metrics, self._monitor)
        self._control.after_step(metrics, result.experiences)
        every = stage.state.step % self._config.checkpoint.every == 0
        if stage.state.step < config.steps and not stage.state.stopped and (every or self._is_best()):
            await self._timed_checkpoint(stage)

    def _is_best(self) -> bool:
        """True if the current weights have the best evaluation so far, and checkpoint.keep_best is set."""
        return bool(self._config.checkpoint.keep_best) and self.state.best_step == self.state.step

    async def _timed_checkpoint(self, stage: Stage) -> None:
        if self.state.step not in self._checkpoints.steps():
            began = time.perf_counter()
            await self._checkpoint(stage)
            self._checkpoint_seconds += time.perf_counter() - began

    async def _evaluate(self, config: StageConfig, stage: Stage) -> dict[str, float]:
        """Evaluate without a step beside it; return the metrics."""
        found = await stage.evaluate()
        self._note(config, stage, found)
        return found.metrics

    def _note(self, config: StageConfig, stage: Stage, found: EvaluationResult) -> None:
        """Store an evaluation, update the best one, decide on early stopping. A resumed run may record it again."""
        step, metrics, earlier = self.state.step, found.metrics, self.state.evaluations
        self._evaluations.write(step, found.experiences)
        self._evaluations.write_results(step, dict(found.to_json(step=step, stage=config.name)))
        known = [each for each in earlier if (each["step"], each["stage"]) != (step, config.name)]
        self.state.evaluations = [*known, {"step": step, "stage": config.name, **metrics}]
        value = metrics.get(_best_metric(self._config, config))
        if value is not None and (self.state.best_value is None or value > self.state.best_value):
            self.state.best_value, self.state.best_step = value, step
        if config.early_stop is not None and config.early_stop.metric in metrics:  # its domain may be paused
            stage.state.consider_stopping(config.early_stop, metrics[config.early_stop.metric])
        self._control.evaluated({"step": step, "stage": config.name, **metrics})

    def _clock(self, stage: str, since: float) -> float:
        now = time.perf_counter()
        self.state.seconds[stage] = self.state.seconds.get(stage, 0.0) + now - since
        return now

    async def _checkpoint(self, stage: Stage) -> None:
        self.state.current = await stage.snapshot()
        self._write(stage.trainer_state(), stage)

    @uncounted_work()
    def _write(self, trainer: dict[str, Any], stage: Stage) -> None:
        self._context.set_activity(f"write the checkpoint of step {self.state.step}")
        stage.load_for_export()
        self._monitor.sync()  # a checkpoint that survives a power failure needs the records of its steps
        self._evaluations.sync()
        model, tokenizer, machine = self._policy.model, self._policy.tokenizer, self._context.machine
        self._checkpoints.write(
            self.state.step, model, tokenizer, self.state.to_json(), trainer, machine, stage.learner.export
        )
        self._prune()
        self._control.checkpointed(self._checkpoints.path(self.state.step))

    def _prune(self) -> None:
        """Remove checkpoints that are not kept; a run killed between writing and pruning does it when resumed."""
        config = self._config.checkpoint
        best = self.state.best_step if config.keep_best else None
        self._checkpoints.prune(config.keep_last, [] if best is None else [best])


def _is_evaluated_alone(config: StageConfig, step: int) -> bool:
    """True if the weights after this step of the stage are evaluated without another step beside them."""
    if config.evaluation is None:
        return False
    if step == 0:
        return config.evaluates_exclusively and config.evaluation.at_start
    return step == config.steps or (config.evaluates_exclusively and step % config.evaluation.every == 0)


def _already_evaluated(state: RunState, stages: list[StageConfig], config: StageConfig) -> bool:
    """True if the previous stage's last evaluation was the same; it is then recorded for this stage, too."""
    before = stages[state.stage - 1] if state.stage else None
    if before is None or _evaluation_key(before) != _evaluation_key(config):
        return False
    done = [each for each in state.evaluations if each["step"] == state.step]
    if done and all(each["stage"] != config.name for each in done):
        state.evaluations.append(done[-1] | {"stage": config.name})
    return bool(done)


def _evaluation_key(stage: StageConfig) -> Any:
    """Everything that an evaluation of this stage depends on, besides the weights."""
    if stage.evaluation is None:
        return None
    settings = stage.evaluation.model_dump(exclude={"every", "at_start"})
    # models frozen at the stage's start
    frozen_at = stage.name if any(each.policy is not None for each in stage.all_models.values()) else ""
    examples = stage.taskset if stage.uses_task_examples else None
    parts = stage.workflow, stage.environment, stage.tools, stage.models, stage.judging
    return settings, stage.rollout.model_dump(), stage.rewards, *parts, stage.domains, frozen_at, examples


def _best_metric(config: RunConfig, stage: StageConfig) -> str:
    """The metric that selects a stage's best checkpoint."""
    assert stage.evaluation is not None
    chosen = config.checkpoint.keep_best
    return chosen if isinstance(chosen, str) else stage.evaluation.watched()[0]
