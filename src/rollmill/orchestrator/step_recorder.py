"""Records the steps of a run: progress, metrics and rollouts."""

from __future__ import annotations

import time

from rollmill.orchestrator.checkpointing import Checkpointing
from rollmill.orchestrator.evaluation_schedule import EvaluationSchedule
from rollmill.orchestrator.loop_callback import LoopCallback, TrainingStep
from rollmill.orchestrator.monitor import Monitor
from rollmill.orchestrator.stages import Stage
from rollmill.orchestrator.state import RunState
from rollmill.progress import reach_step


class StepRecorder(LoopCallback):
    """Records each step, with the evaluations beside it and after it.

    It comes before the checkpoint: a run killed in between repeats the step and drops its metrics.
    """

    def __init__(
        self, state: RunState, monitor: Monitor, evaluation: EvaluationSchedule, checkpointing: Checkpointing
    ) -> None:
        self._state, self._monitor = state, monitor
        self._evaluation, self._checkpointing = evaluation, checkpointing

    async def after_step(self, stage: Stage, step: TrainingStep) -> None:
        await self._evaluation.finish(stage)  # of the weights before the step
        state, metrics = self._state, step.metrics
        state.step = stage.version
        state.generated_tokens += step.generated_tokens
        state.generation_seconds += step.seconds.get("rollout", 0.0)
        metrics["seconds/checkpoint"] = self._checkpointing.take_seconds()
        began = time.perf_counter()
        try:
            if evaluated := await self._evaluation.evaluate_alone(stage):
                metrics.update(evaluated, **{"seconds/eval": time.perf_counter() - began})
        finally:  # after an error a checkpoint of this step may follow, and a resumed run repeats the evaluation only
            self._monitor.step(metrics, step.experiences, step.began, step.spans)
        reach_step(state.step)
