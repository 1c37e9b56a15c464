"""Ends runs whose engine computes something else than the trainer."""

from __future__ import annotations

from typing import Any

from rollmill.config.run import StageConfig
from rollmill.errors import TrainingError
from rollmill.orchestrator.monitor import Monitor
from rollmill.trackers.metrics_log import Metrics

_LIMIT = 0.1  # nats per token; rounding in fp32 makes about 1e-5
_STEPS = 3


class MismatchAlarm:
    """Counts steps in a row in which engine and trainer disagree by more than rounding explains.

    Args:
        precision: type in which both compute. In bf16 rounding alone can be large, so nothing is counted.
        stops: whether the run ends then, or is only told.
    """

    def __init__(self, precision: str, *, stops: bool) -> None:
        self._exact, self._stops = precision == "fp32", stops
        self._steps, self._said = 0, set[str]()

    def check(self, stage: StageConfig, metrics: Metrics, monitor: Monitor) -> None:
        """Add a recorded step.

        Raises TrainingError after `_STEPS` steps in a row, unless the user has asked to go on.
        """
        gap: Any = metrics.get("logprob_gap/mean", 0.0)
        compared = self._exact and stage.engine.computes_like_trainer() and metrics.get("logprob_gap/tokens")
        self._steps = self._steps + 1 if compared and gap > _LIMIT else 0
        if self._steps < _STEPS or stage.name in self._said:
            return
        self._said.add(stage.name)
        text = (
            f"engine and trainer disagree in {_STEPS} steps in a row: with the same weights, their log-probs differ by "
            f"{gap:.2g} nats per token on average (logprob_gap/mean), and in fp32 rounding makes about .00001. What is "
            "trained is not what was rolled out. `rollmill check --model FOLDER` compares both with transformers and "
            "names the first layer that differs"
        )
        if self._stops:
            raise TrainingError(f"{text}; monitor.stop_on_mismatch: false trains nevertheless")
        monitor.incident(text)
