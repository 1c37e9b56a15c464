"""Where a run is: which stage, which step, and how long the stage will still take."""

from __future__ import annotations

from collections.abc import Sequence

from rollmill.trackers.metrics_log import Metrics

Stages = Sequence[tuple[str, int]]

_RECENT = 20


class RunProgress:
    """Follows the metrics of a run. Steps count over all stages; a stage may end before its planned steps."""

    def __init__(self, stages: Stages) -> None:
        self.stages = list(stages)
        self.index = 0  #: of the stage
        self.begun_at = 0  #: steps made before this stage
        self.step = 0
        self._recent: list[float] = []

    def update(self, metrics: Metrics) -> None:
        """Take in the metrics of a step or of an evaluation."""
        step = metrics["step"]
        assert isinstance(step, int)
        while self.index + 1 < len(self.stages) and self._left_stage(step, metrics.get("stage")):
            self.begun_at = min(self.step, self.begun_at + self.stages[self.index][1])
            self.index += 1
            self._recent.clear()
        self.step = max(self.step, step)
        seconds = metrics.get("seconds/total")
        if isinstance(seconds, float | int):
            self._recent = [*self._recent[1 - _RECENT :], float(seconds)]

    @property
    def stage(self) -> str:
        """Name of the current stage."""
        return self.stages[self.index][0] if self.stages else ""

    @property
    def total(self) -> int:
        """Steps of the whole run, as far as known: stages that ended early count with the steps they made."""
        return max(self.step, self.begun_at + sum(steps for _, steps in self.stages[self.index :]))

    @property
    def stage_step(self) -> int:
        """Steps made in this stage."""
        return self.step - self.begun_at

    @property
    def stage_total(self) -> int:
        """Steps planned for this stage."""
        return max(self.stage_step, self.stages[self.index][1] if self.stages else 0)

    @property
    def seconds_left(self) -> float | None:
        """Until the stage ends, from the mean of its recent steps; None before its first step."""
        if not self._recent:
            return None
        return (self.stage_total - self.stage_step) * sum(self._recent) / len(self._recent)

    def _left_stage(self, step: int, stage: object) -> bool:
        name, steps = self.stages[self.index]
        later = [other for other, _ in self.stages[self.index + 1 :]]
        return step > self.begun_at + steps or (stage != name and stage in later)
