"""Decides when a stage's weights are evaluated, and what that changes in the run: records, the best step, its end.

Weights are evaluated at the start of a stage (`evaluation.at_start`), after every `evaluation.every` steps, and at the
end. An evaluation runs beside the rollouts of the next step, since both need the same weights. It runs alone at the
end, and where the stage cannot do both at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollmill.config.run import RunConfig, StageConfig
from rollmill.orchestrator.checkpointing import Checkpointing
from rollmill.orchestrator.evaluation import Evaluation, EvaluationResult
from rollmill.orchestrator.loop_callback import LoopCallback
from rollmill.orchestrator.monitor import Monitor
from rollmill.orchestrator.run_control import RunControl
from rollmill.orchestrator.stages import Stage
from rollmill.orchestrator.state import RunState
from rollmill.trackers.rollout_log import RolloutLog


class EvaluationSchedule(LoopCallback):
    """Evaluates the weights of each stage when its run file says so.

    Args:
        log: stores completions and results.
    """

    def __init__(
        self,
        config: RunConfig,
        stages: Sequence[StageConfig],
        state: RunState,
        monitor: Monitor,
        control: RunControl,
        log: RolloutLog,
        checkpointing: Checkpointing,
    ) -> None:
        self._config, self._stages, self._state, self._log = config, stages, state, log
        self._monitor, self._control, self._checkpointing = monitor, control, checkpointing
        self._beside: tuple[int, Evaluation] | None = None  # the run's step, and its evaluation beside the next step

    def _is_due(self, stage: Stage) -> bool:
        """True if the current weights are to be evaluated.

        A resumed run repeats an evaluation beside a step, so that it computes the same as an uninterrupted run.
        """
        evaluation, step = stage.config.evaluation, stage.state.step
        if evaluation is None:
            return False
        if step == 0:
            return evaluation.at_start and not self._already_evaluated(stage)
        return step == stage.config.steps or step % evaluation.every == 0

    def _already_evaluated(self, stage: Stage) -> bool:
        """True if the last evaluation of the stage before was the same; it is then recorded for this stage, too."""
        if not self._state.stage or _evaluation_key(self._before(stage)) != _evaluation_key(stage.config):
            return False
        done = [each for each in self._state.evaluations if each["step"] == self._state.step]
        if done and all(each["stage"] != stage.config.name for each in done):
            self._state.evaluations.append(done[-1] | {"stage": stage.config.name})
        return bool(done)

    def _before(self, stage: Stage) -> StageConfig:
        """The stage before this one; the first is its own."""
        return self._stages[self._state.stage - 1] if self._state.stage else stage.config

    # -- events ------------------------------------------------------------------------------------------------

    async def on_stage_begin(self, stage: Stage) -> None:
        """Evaluate what is due alone and has no record: the first weights, or those of a checkpoint that was written
        when their evaluation failed."""
        if stage.state.step == 0 and _evaluation_key(self._before(stage)) != _evaluation_key(stage.config):
            self._state.best_value = self._state.best_step = None  # another metric: not comparable
        recorded = [(each["step"], each["stage"]) for each in self._state.evaluations]
        if (self._state.step, stage.config.name) in recorded:
            return  # the run was interrupted between the evaluation and the next step
        if metrics := await self.evaluate_alone(stage):
            self._monitor.evaluation({"step": self._state.step, **metrics})

    async def before_step(self, stage: Stage) -> None:
        if self._is_due(stage) and not _runs_alone(stage):
            assert stage.evaluator is not None
            stage.sync_weights()
            self._beside = self._state.step, stage.evaluator.begin()

    async def before_update(self, stage: Stage) -> None:
        """Wait for the completions of the evaluation beside the step; for their rewards, too, if a checkpoint of these
        weights may follow, or reward models are offloaded."""
        if self._beside is None:
            return
        with stage.trace.enter_phase("eval", "completions of the evaluation"):
            await self._beside[1].generated()
        if self._config.checkpoint.keep_best or stage.offloader is not None:
            await self.finish(stage)
            if stage.state.step > 0 and self._checkpointing.is_best():
                await self._checkpointing.save(stage)

    async def step_failed(self, stage: Stage) -> None:
        if self._beside is not None:
            await self._beside[1].cancel()
            self._beside = None

    async def finish(self, stage: Stage) -> None:
        """Wait for the rewards of the evaluation beside the step, if there is one, and record it."""
        if self._beside is None:
            return
        step, evaluation = self._beside
        with stage.trace.enter_phase("eval", "rewards of the evaluation"):
            found = await evaluation.result()
        self._beside = None
        self._record(stage, step, found)
        self._monitor.evaluation({"step": step, **found.metrics})

    async def evaluate_alone(self, stage: Stage) -> dict[str, float]:
        """Evaluate the current weights if that is due without a step beside it; return the metrics.

        After a step `StepRecorder` asks for it, as the metrics belong into the step's record.
        """
        if not (self._is_due(stage) and _runs_alone(stage)):
            return {}
        found = await stage.evaluate()
        self._record(stage, self._state.step, found)
        return found.metrics

    def _record(self, stage: Stage, step: int, found: EvaluationResult) -> None:
        """Store an evaluation, update the best one, decide on early stopping. A resumed run may record it again."""
        config, metrics, state = stage.config, found.metrics, self._state
        self._log.write(step, found.experiences)
        self._log.write_results(step, dict(found.to_json(step=step, stage=config.name)))
        known = [each for each in state.evaluations if (each["step"], each["stage"]) != (step, config.name)]
        state.evaluations = [*known, {"step": step, "stage": config.name, **metrics}]
        assert config.evaluation is not None
        chosen = self._config.checkpoint.keep_best
        value = metrics.get(chosen if isinstance(chosen, str) else config.evaluation.watched()[0])
        if value is not None and (state.best_value is None or value > state.best_value):
            state.best_value, state.best_step = value, step
        if config.early_stop is not None and config.early_stop.metric in metrics:  # its domain may be paused
            stage.state.consider_stopping(config.early_stop, metrics[config.early_stop.metric])
        self._control.evaluated({"step": step, "stage": config.name, **metrics})


def _runs_alone(stage: Stage) -> bool:
    """True if the current weights are evaluated without a step beside it."""
    return stage.config.evaluates_exclusively or stage.state.step == stage.config.steps


def _evaluation_key(stage: StageConfig) -> Any:
    """Everything that an evaluation of a stage depends on, besides the weights."""
    if stage.evaluation is None:
        return None
    settings = stage.evaluation.model_dump(exclude={"every", "at_start"})
    # models frozen at the stage's start
    frozen_at = stage.name if any(each.policy is not None for each in stage.all_models.values()) else ""
    examples = stage.taskset if stage.uses_task_examples else None
    parts = stage.workflow, stage.environment, stage.tools, stage.models, stage.reward_settings
    return settings, stage.rollout.model_dump(), stage.rewards, *parts, stage.domains, frozen_at, examples
