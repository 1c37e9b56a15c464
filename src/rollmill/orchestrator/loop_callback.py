"""Events of the training loop, and what a step reports to those who hear of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rollmill.trackers.trace import Span
from rollmill.types import Experience

if TYPE_CHECKING:
    from rollmill.orchestrator.stages import Stage


@dataclass(frozen=True, slots=True)
class TrainingStep:
    """Metrics and trajectories of one training step."""

    metrics: dict[str, Any]  #: grows: callbacks add what they measure
    experiences: list[Experience]
    generated_tokens: int
    began: float  #: time.perf_counter() at the start
    seconds: dict[str, float]  #: by phase, and `total`; evaluations and checkpoints come on top
    spans: list[Span]


class LoopCallback:
    """Base of what happens around the steps: evaluation, metrics, warnings, users' callbacks, checkpoints.

    A subclass overrides the events that it needs. An exception ends the run; a checkpoint of the last step is written
    first if the error may pass, or is that of a user's callback.
    """

    async def on_stage_begin(self, stage: Stage) -> None:
        """Called before the first step of a stage, and when a run resumes in it. May be cancelled by an interrupt."""

    async def before_step(self, stage: Stage) -> None:
        """Called before the rollouts of a step. May be cancelled by an interrupt, like the two below."""

    async def before_update(self, stage: Stage) -> None:
        """Called once the batch of a step is complete, before the weights change."""

    async def step_failed(self, stage: Stage) -> None:
        """Called when a step ends by an exception or an interrupt."""

    async def after_step(self, stage: Stage, step: TrainingStep) -> None:
        """Called after a step that counts; `stage.version` is that of the new weights."""
