"""The master: makes the components of each stage, paces them, evaluates, checkpoints, resumes.

Components never call the master.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path
from typing import Any

from rollmill.config.run import RunConfig, StageConfig
from rollmill.master.buffers import Buffers
from rollmill.master.checkpoint import Checkpoints
from rollmill.master.interrupt import Interrupted, Interrupts
from rollmill.master.measures import rewards_without_verdict
from rollmill.master.selection import StageTasks
from rollmill.master.stage import StageRun
from rollmill.master.state import RunState, StageState
from rollmill.master.summary import summarise
from rollmill.models.load import Policy
from rollmill.monitor.monitor import Monitor
from rollmill.monitor.rollouts import RolloutStore

EVALUATIONS = "evaluations"


Serving = Callable[[StageRun], AbstractAsyncContextManager[None]]
"""Serves a stage's policy to an application while it is trained."""


class Master:
    """Runs the stages of a run in this process."""

    def __init__(
        self,
        run_dir: Path,
        config: RunConfig,
        stages: list[StageConfig],
        policy: Policy,
        tasks: list[StageTasks],
        monitor: Monitor,
        *,
        precision: str,
        buffers: Buffers,
        serving: Serving | None = None,
    ) -> None:
        self._run_dir = run_dir
        self._config = config
        self._stages = stages
        self._policy = policy
        self._tasks = tasks
        self._monitor = monitor
        self._precision = precision
        self._buffers = buffers
        self._serving = serving
        self._checkpoints = Checkpoints(run_dir)
        self._evaluations = RolloutStore(run_dir / EVALUATIONS)
        self._interrupts: Interrupts
        self._checkpoint_seconds = 0.0
        self.state = RunState()

    async def run(self, resumed: tuple[RunState, dict[str, Any]] | None = None) -> dict[str, Any]:
        """Run what is left and return the summary. `resumed` is a checkpoint's state and trainer state.

        Raises:
            Interrupted: the user asked to end; a checkpoint of the last step is written.
            RollmillError: whatever stopped the run.
        """
        self._interrupts = Interrupts()
        self._warned: set[tuple[str, str]] = set()
        trainer: dict[str, Any] = {}
        if resumed is not None:
            self.state, trainer = resumed
            self._prune()
        with self._interrupts.installed():
            while self.state.stage < len(self._stages):
                await self._stage(self._stages[self.state.stage], trainer)
                trainer = {}
        return summarise(self.state, [stage.name for stage in self._stages], self._checkpoints)

    async def _stage(self, config: StageConfig, trainer: dict[str, Any]) -> None:
        stage = StageRun(
            config,
            self._policy,
            self._tasks[self.state.stage],
            index=self.state.stage,
            seed=self._config.seed,
            first_version=self.state.step - self.state.current.step,
            precision=self._precision,
            buffers=self._buffers,
        )
        try:
            if trainer:
                stage.restore(self.state.current, trainer)
            else:
                stage.begin(self.state.current.stores)
                self._announce(config, stage)
            self.state.current = stage.state
            async with nullcontext() if self._serving is None else self._serving(stage):
                await self._train(config, stage)
        finally:
            await stage.close()

    def _announce(self, config: StageConfig, stage: StageRun) -> None:
        self._monitor.message(
            f"stage {config.name}: {config.algorithm.name}, {config.steps} steps, "
            f"{len(stage.tasks.training.tasks)} tasks loaded, {len(stage.tasks.training.rejected)} rejected"
        )
        for note in stage.tasks.notes:
            self._monitor.message(note)

    async def _train(self, config: StageConfig, stage: StageRun) -> None:
        state, started = stage.state, time.perf_counter()
        if state.step == 0 and self.state.stage and _measures(self._stages[self.state.stage - 1]) != _measures(config):
            self.state.best_value = self.state.best_step = None  # another measure: not comparable
        try:
            if state.step == 0 and config.evaluation is not None and config.evaluation.at_start:
                await self._evaluate_at_start(config, stage)
            while state.step < config.steps and not state.stopped:
                await self._one_step(config, stage)
                started = self._clock(config.name, started)
        except Interrupted:
            self._clock(config.name, started)
            if self.state.step not in self._checkpoints.steps():
                await self._checkpoint(stage)
            raise
        self.state.stage += 1
        self.state.current = StageState(stores=state.stores)
        self._write({}, stage)  # the next stage starts from these weights, with a fresh optimizer

    async def _evaluate_at_start(self, config: StageConfig, stage: StageRun) -> None:
        """Evaluate before the first step, unless the stage before has just done the same."""
        done = self.state.evaluations[-1] if self.state.evaluations else None
        if done is not None and (done["step"], done["stage"]) == (self.state.step, config.name):
            return  # interrupted between the evaluation and the first step
        before = self._stages[self.state.stage - 1] if self.state.stage else None
        same = before is not None and _measures(before) == _measures(config)
        if done is not None and same and done["step"] == self.state.step:
            self.state.evaluations.append(done | {"stage": config.name})
            return
        metrics = await self._interrupts.guard(self._evaluate(config, stage))
        self._monitor.evaluation({"step": self.state.step, **metrics})

    async def _one_step(self, config: StageConfig, stage: StageRun) -> None:
        result = await self._interrupts.guard(stage.step())
        self.state.step = stage.version
        self.state.generated_tokens += result.generated_tokens
        self.state.generation_seconds += result.seconds.get("rollout", 0.0)
        tokens = result.generated_tokens or result.metrics["tokens"]
        metrics = {"step": self.state.step, "stage": config.name, "version": stage.version, **result.metrics}
        metrics["tokens_per_second"] = tokens / result.seconds["total"]
        metrics |= {f"seconds/{phase}": seconds for phase, seconds in result.seconds.items()}
        metrics["seconds/checkpoint"], self._checkpoint_seconds = self._checkpoint_seconds, 0.0
        last = stage.state.step == config.steps
        if config.evaluation is not None and (last or stage.state.step % config.evaluation.every == 0):
            began = time.perf_counter()
            metrics |= await self._evaluate(config, stage)
            metrics["seconds/eval"] = time.perf_counter() - began
        # metrics before the checkpoint: a run killed in between makes the step again and drops this line
        self._monitor.step(metrics, result.experiences, result.began, result.spans)
        for reward, warning in rewards_without_verdict(result.experiences).items():
            if (config.name, reward) not in self._warned:
                self._monitor.message(warning)
            self._warned.add((config.name, reward))
        keep = self._config.checkpoint
        is_best = keep.keep_best and self.state.best_step == self.state.step
        if not last and not stage.state.stopped and (is_best or stage.state.step % keep.every == 0):
            began = time.perf_counter()
            await self._checkpoint(stage)
            self._checkpoint_seconds = time.perf_counter() - began

    async def _evaluate(self, config: StageConfig, stage: StageRun) -> dict[str, float]:
        """Evaluate, note the best, decide on early stopping; the metrics."""
        assert stage.evaluator is not None, "the capability check asks for rewards where there is an evaluation"
        metrics, experiences = await stage.evaluator.evaluate(config.rollout.deadline_s)
        self._evaluations.write(self.state.step, experiences)
        self.state.evaluations.append({"step": self.state.step, "stage": config.name, **metrics})
        value = metrics.get("eval/sampled", metrics.get("eval/greedy", 0.0))
        if self.state.best_value is None or value > self.state.best_value:
            self.state.best_value, self.state.best_step = value, self.state.step
        if config.early_stop is not None:
            stage.state.consider_stopping(config.early_stop, metrics[config.early_stop.metric])
        return metrics

    def _clock(self, stage: str, since: float) -> float:
        now = time.perf_counter()
        self.state.seconds[stage] = self.state.seconds.get(stage, 0.0) + now - since
        return now

    async def _checkpoint(self, stage: StageRun) -> None:
        self.state.current = await stage.snapshot()
        self._write(stage.trainer_state(), stage)

    def _write(self, trainer: dict[str, Any], stage: StageRun) -> None:
        model, tokenizer = self._policy.model, self._policy.tokenizer
        self._checkpoints.write(self.state.step, model, tokenizer, self.state.to_json(), trainer, stage.export)
        self._prune()

    def _prune(self) -> None:
        """Remove checkpoints that are not to be kept; a run killed between writing and this does it on resuming."""
        config = self._config.checkpoint
        best = self.state.best_step if config.keep_best else None
        self._checkpoints.prune(config.keep_last, [] if best is None else [best])


def _measures(stage: StageConfig) -> Any:
    """What an evaluation of this stage depends on, besides the weights."""
    if stage.evaluation is None:
        return None
    return stage.evaluation.model_dump(exclude={"every", "at_start"}), stage.rollout.model_dump(), stage.rewards
