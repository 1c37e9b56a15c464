"""Measures the steps of a stage: time by phase, and what its components counted meanwhile."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from rollmill.orchestrator.loop_callback import TrainingStep
from rollmill.orchestrator.metrics import (
    PHASES,
    batch_metrics,
    domain_metrics,
    engine_metrics,
    generation_metrics,
    judging_metrics,
    role_metrics,
    seconds_of,
)
from rollmill.orchestrator.phases import MOVE
from rollmill.types import Experience
from rollmill.waiting import OUTAGES

if TYPE_CHECKING:
    from rollmill.orchestrator.stages import Stage


class StepMeter:
    """Readings of a stage's components at the start of a step and at its end."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._rewards: Counter[str] = Counter()  # counters at the end of the last step, as are the two below
        self._engine: dict[str, float] = {}
        self._outage_seconds = OUTAGES.seconds()

    def begin(self) -> None:
        """Start a step."""
        self._began, self._tokens = time.perf_counter(), self._stage.backend.generating.tokens_generated
        self._engine_before = self._stage.engine.counters()

    def end_rollouts(self) -> None:
        """Count the tokens generated until now as those of the step: explorers go on while the trainer works."""
        self._generated = self._stage.backend.generating.tokens_generated - self._tokens

    def finish(self, batch: list[Experience], trained: dict[str, float], version: int) -> TrainingStep:
        """Build the result of a step.

        Args:
            trained: the trainer's metrics.
            version: of the weights that the batch was learned with, before the update.
        """
        stage = self._stage
        metrics: dict[str, Any] = {"step": stage.version, "stage": stage.config.name, "version": stage.version}
        metrics |= batch_metrics(batch, version) | role_metrics(batch) | trained
        if stage.config.domains:
            metrics |= domain_metrics(batch, version)
        total, spans = time.perf_counter() - self._began, stage.trace.take()
        kinds = {span.kind for span in spans}
        seconds = {phase: seconds_of(spans, phase) for phase in (*PHASES, MOVE) if phase in kinds}
        seconds["total"] = total
        metrics |= judging_metrics(spans) | self._counted()
        metrics["tokens_per_second"] = (self._generated or metrics["tokens"]) / total
        metrics |= {f"seconds/{phase}": each for phase, each in seconds.items()}
        return TrainingStep(metrics, batch, self._generated, self._began, seconds, spans)

    def _counted(self) -> dict[str, float]:
        """Counts of rewards, engine, rollouts, environments and offloading since the last step."""
        stage = self._stage
        rewards = Counter(stage.backend.reward_counters())
        for each in [] if stage.evaluator is None else stage.evaluator.counters():
            rewards.update(each)
        metrics = {f"judging/{key}": value - self._rewards.get(key, 0.0) for key, value in rewards.items()}
        outages_before, self._outage_seconds = self._outage_seconds, OUTAGES.seconds()
        if self._outage_seconds > outages_before:
            metrics["judging/away_seconds"] = self._outage_seconds - outages_before
        engine = stage.engine.counters()
        metrics |= generation_metrics(self._engine_before, engine, self._generated)
        metrics |= engine_metrics(self._engine, engine)
        self._rewards, self._engine = rewards, engine
        metrics |= ({} if stage.batches is None else stage.batches.metrics()) | stage.pipeline.metrics()
        metrics |= stage.backend.metrics()
        return metrics | ({} if stage.offloader is None else stage.offloader.metrics())
