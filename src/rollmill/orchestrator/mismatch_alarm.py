"""Ends runs whose engine computes something else than the trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rollmill.errors import TrainingError
from rollmill.orchestrator.loop_callback import LoopCallback, TrainingStep
from rollmill.orchestrator.monitor import Monitor

if TYPE_CHECKING:
    from rollmill.orchestrator.stages import Stage

_LIMIT = 0.1  # nats per token; rounding in fp32 makes about 1e-5
_STEPS = 3


class MismatchAlarm(LoopCallback):
    """Counts steps in a row in which engine and trainer disagree by more than rounding explains.

    Args:
        precision: type in which both compute. In bf16 rounding alone can be large, so nothing is counted.
        stops: whether the run ends then, or is only told.
    """

    def __init__(self, precision: str, monitor: Monitor, *, stops: bool) -> None:
        self._exact, self._monitor, self._stops = precision == "fp32", monitor, stops
        self._steps, self._said = 0, set[str]()

    async def after_step(self, stage: Stage, step: TrainingStep) -> None:
        """Raise TrainingError after `_STEPS` such steps in a row, unless the user has asked to go on."""
        gap: Any = step.metrics.get("logprob_gap/mean", 0.0)
        same = self._exact and stage.config.engine.computes_like_trainer()
        compared = same and step.metrics.get("logprob_gap/tokens")
        self._steps = self._steps + 1 if compared and gap > _LIMIT else 0
        if self._steps < _STEPS or stage.config.name in self._said:
            return
        self._said.add(stage.config.name)
        text = (
            f"engine and trainer disagree in {_STEPS} steps in a row: with the same weights, their log-probs differ by "
            f"{gap:.2g} nats per token on average (logprob_gap/mean), and in fp32 rounding makes about .00001. What is "
            "trained is not what was rolled out. `rollmill check --model FOLDER` compares both with transformers and "
            "names the first layer that differs"
        )
        if self._stops:
            raise TrainingError(f"{text}; monitor.stop_on_mismatch: false trains nevertheless")
        self._monitor.incident(text)
