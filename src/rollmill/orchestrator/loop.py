"""One training step, from tasks to published weights.

    tasks -> rollouts -> rewards -> pipeline -> buffer -> batch -> advantages -> optimizer steps -> weights

Rewards, pipeline and buffer are steps of the batch source (batches.py), advantages and optimizer steps of the trainer
(learner.py). Synchronous, one-step-off-policy, asynchronous, partial and remote rollouts all run this loop. They differ
in three places outside it: how far ahead the scheduler may start rollouts (`max_staleness`, scheduler.py), what ends a
step's rollouts (all of them, the first ones, or a token budget; scheduler.py), and which process rolls out (the stage's
rollout backend, stages.py).
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from rollmill.errors import StoreError
from rollmill.orchestrator.metrics import (
    PHASES,
    batch_metrics,
    domain_metrics,
    engine_metrics,
    generation_metrics,
    judging_metrics,
    require_rewards,
    role_metrics,
    seconds_of,
    sum_metrics,
)
from rollmill.orchestrator.phases import MOVE
from rollmill.orchestrator.stages import Stage
from rollmill.trackers.trace import Span
from rollmill.types import Experience
from rollmill.waiting import OUTAGES

_TURNS = 5
"""Turns of the event loop after which the scheduler has seen that its completions have ended: the engine wakes the
request, the request its rollout, the rollout its group, and the group the scheduler."""


@dataclass(frozen=True, slots=True)
class TrainingStepResult:
    """Metrics and trajectories of one training step."""

    metrics: dict[str, Any]
    experiences: list[Experience]
    generated_tokens: int
    began: float  #: time.perf_counter() at the start
    seconds: dict[str, float]  #: by phase, and `total`; evaluations and checkpoints come on top
    spans: list[Span]


class TrainingLoop:
    """Makes the training steps of one stage."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.updates = False  #: an update has begun and is not counted as a step yet: the weights belong to no version
        self._reward_counters: Counter[str] = Counter()  # at the end of the last step, as are the engine's
        self._engine_counters: dict[str, float] = {}
        self._away_seconds = OUTAGES.seconds()

    async def step(self, before_update: Callable[[], Awaitable[None]] | None = None) -> TrainingStepResult:
        """Make one training step: collect a batch, learn from it, publish the new weights if they are due.

        An update that has begun is never cancelled, neither here nor in a thread (`Learner.step_in_thread`), and
        `finish_step` follows it at once. So an interrupted step either counts as made or leaves the state as it was.

        Args:
            before_update: waits for what else needs the weights as they are: an evaluation that shares the engine.

        Raises:
            RewardError: no reward applies to any completion of the batch.
            TrainingError: a loss or gradient is not finite.
            RollmillError: a rollout, the pipeline or the buffer failed.
        """
        stage, started = self.stage, time.perf_counter()
        tokens_before, engine_before = stage.backend.tokens_generated, stage.engine.counters()

        batch = await self.collect(shares_engine=before_update is not None)
        if before_update is not None:
            await before_update()
        generated = stage.backend.tokens_generated - tokens_before
        require_rewards(batch, f"stage {stage.config.name}, step {stage.state.step + 1}")

        version = stage.version  # of the weights before the update
        if stage.offloader is not None:  # what `collect` has precomputed is not computed again
            await self._precompute(batch)  # in its own phase, before reward models and the engine are offloaded
        await stage.offload_other_processes("train")
        await stage.engine.sleep()  # frees its memory, if `engine.sleep` is set; its next request wakes it
        with stage.trace.enter_phase("train"):
            if stage.backend.trains_in_thread:
                trained = await self._learn_in_thread(batch)
            else:
                trained = self.learn(batch)
            metrics: dict[str, Any] = batch_metrics(batch, version) | role_metrics(batch) | trained
            if stage.config.domains:
                metrics |= domain_metrics(batch, version)

        total, spans = time.perf_counter() - started, stage.trace.take()
        kinds = {span.kind for span in spans}
        seconds = {phase: seconds_of(spans, phase) for phase in (*PHASES, MOVE) if phase in kinds}
        metrics |= judging_metrics(spans) | self._component_metrics(engine_before, generated)
        return TrainingStepResult(metrics, batch, generated, started, seconds | {"total": total}, spans)

    # -- the batch ---------------------------------------------------------------------------------------------

    async def collect(self, *, shares_engine: bool = False) -> list[Experience]:
        """Collect the experiences of the next step; while rewards are awaited, the trainer's inference goes on.

        Rollouts made here, replayed groups and demonstrations. Without rollouts (SFT, DPO) demonstrations alone. Where
        the pipeline drops groups, `batches.collect` rolls out others in their place.

        Args:
            shares_engine: the engine also serves an evaluation, so the deadline of rollouts is twice as long.
        """
        stage, batches = self.stage, self.stage.batches
        algorithm = stage.config.algorithm
        if batches is None:
            return await self._demonstrations(algorithm.demonstrations_per_step(0))
        with stage.trace.enter_phase("rollout", f"{stage.backend.display_name} to finish its completions"):
            await batches.roll_out(stage.version, deadlines=2 if shares_engine else 1)
        completions = stage.config.rollout.batch * stage.config.rollout.group_size
        replayed = batches.replay(stage.version)
        others = replayed + await self._demonstrations(algorithm.demonstrations_per_step(completions))
        if stage.offloader is None or not shares_engine:  # else the engine is still at work, and nothing may move
            unscored = await self._unscored_batch()
            if unscored is not None:
                await self._precompute(unscored + others)
        return await batches.collect(stage.version) + others

    async def _demonstrations(self, count: int) -> list[Experience]:
        """Draw demonstrations, pairs or labelled completions, and pass them through the pipeline.

        Raises StoreError where the batch would be empty.
        """
        stage = self.stage
        if stage.offline_data is None or count == 0:
            return []
        phase = (
            stage.trace.enter_phase("reward", "demonstrations to pass the pipeline")
            if len(stage.pipeline)
            else nullcontext()
        )
        with phase:
            drawn = await stage.offline_data.draw(count, step=stage.state.step, version=stage.version)
        if not drawn and stage.batches is None:
            names, dropped = ", ".join(stage.config.experts.sources), stage.pipeline.describe_dropped()
            raise StoreError(
                f"stage {stage.config.name}: nothing to learn from in experts.sources ({names}); give feedback first "
                "(`rollmill feedback`), or name other sources" + (f". The pipeline: {dropped}" if dropped else "")
            )
        return drawn

    async def _unscored_batch(self) -> list[Experience] | None:
        """Return the experiences of the next batch, some still without rewards.

        None if others may take their place: there is a pipeline, which may drop some, or groups wait in the buffer.
        """
        assert self.stage.batches is not None
        for _ in range(_TURNS):
            await asyncio.sleep(0)
            if (unscored := self.stage.batches.peek()) is not None:
                return unscored
        return None

    async def _precompute(self, batch: list[Experience]) -> None:
        """Make the trainer's passes that need no rewards: reference and old log-probs, values."""
        await self.stage.offload_other_processes("inference")
        with self.stage.trace.enter_phase("inference"):
            for _ in self.stage.learner.precompute(batch, self.stage.version):
                await asyncio.sleep(0)  # rewards and requests go on in between

    # -- the update --------------------------------------------------------------------------------------------

    def learn(self, batch: list[Experience]) -> dict[str, float]:
        """Make the optimizer steps, publish the weights if they are due, and return the trainer's metrics."""
        self.updates = True  # and stays so after an error: the weights may be those of no step
        metrics = self.stage.learner.step(batch, self.stage.version, self._upcoming())
        self.stage.finish_step()
        self.updates = False
        return metrics

    async def _learn_in_thread(self, batch: list[Experience]) -> dict[str, float]:
        """`learn` with the optimizer steps in a thread, so that the event loop can serve requests and explorers.

        An engine of this process pauses meanwhile, since its weights are the ones that change.
        """
        engine = self.stage.engine
        engine.pause()
        try:
            await engine.drain()
            self.updates = True
            metrics = await self.stage.learner.step_in_thread(batch, self.stage.version, self._upcoming())
            self.stage.finish_step()
            self.updates = False
            return metrics
        finally:
            engine.resume()

    def _upcoming(self) -> list[list[Experience]]:
        """Completions of later steps, batch by batch: the trainer compares its log-probs with the engine's on some."""
        return [] if self.stage.batches is None else self.stage.batches.upcoming()

    # -- metrics -----------------------------------------------------------------------------------------------

    def _component_metrics(self, engine_before: dict[str, float], generated: int) -> dict[str, float]:
        """Counts of rewards, engine, rollouts, environments and offloading since the last step.

        Args:
            engine_before: the engine's counters before this step.
            generated: tokens generated in this step.
        """
        stage = self.stage
        evaluated = [] if stage.evaluator is None else stage.evaluator.metrics()
        rewards = Counter(stage.backend.reward_counters())
        for each in [] if stage.evaluator is None else stage.evaluator.counters():
            rewards.update(each)
        engine = stage.engine.counters()
        before, self._reward_counters = self._reward_counters, rewards
        engine_last, self._engine_counters = self._engine_counters, engine
        metrics = {f"judging/{key}": value - before.get(key, 0.0) for key, value in rewards.items()}
        away_before, self._away_seconds = self._away_seconds, OUTAGES.seconds()
        if self._away_seconds > away_before:
            metrics["judging/away_seconds"] = self._away_seconds - away_before
        metrics |= generation_metrics(engine_before, engine, generated) | engine_metrics(engine_last, engine)
        metrics |= ({} if stage.batches is None else stage.batches.metrics()) | stage.pipeline.metrics()
        metrics |= sum_metrics([stage.backend.metrics(), *evaluated])
        return metrics | ({} if stage.offloader is None else stage.offloader.metrics())
