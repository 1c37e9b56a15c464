"""Progress of a run: the part of a checkpoint besides weights and optimizer, and the basis of the summary.

`Stage._mark_boundary` (stages.py) fills the state of a stage after each step, with the help of scheduler, buffer and
pipeline; `Stage.snapshot` adds the groups that wait.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from rollmill.config.run import EarlyStopConfig


@dataclass(slots=True)
class StageState:
    """Progress of the current stage at a step boundary."""

    step: int = 0  #: training steps done in this stage
    submitted: int = 0  #: tasks handed to the explorer
    tasks: dict[str, Any] | None = None  #: the sampler's state
    experts: dict[str, Any] | None = None  #: the demonstration sampler's state
    pipeline: dict[str, Any] = field(default_factory=dict)  #: the pipeline operators' states
    stores: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Marks of buffers by kind: a position in SQL, the groups themselves in memory."""
    groups: list[list[dict[str, Any]]] = field(default_factory=list)  #: finished groups not yet trained on
    numbers: list[int] = field(default_factory=list)  #: numbers of these groups, in order of submission
    unfinished: list[tuple[int, str]] = field(default_factory=list)  #: groups to roll out again: number and task
    again: list[tuple[str, int]] = field(default_factory=list)  #: stopped tasks, with their numbers of stops
    best: float | None = None  #: best evaluation of this stage, for early stopping
    since_best: int = 0  #: evaluations since the best one
    stopped: bool = False  #: ended early

    def consider_stopping(self, rule: EarlyStopConfig, value: float) -> None:
        """Apply early stopping to an evaluation: stop when it is good enough, or after too many without improvement."""
        improved = self.best is None or value > self.best
        self.best = value if improved else self.best
        self.since_best = 0 if improved else self.since_best + 1
        reached = rule.at_least is not None and value >= rule.at_least
        stuck = rule.patience is not None and self.since_best >= rule.patience
        self.stopped = self.step > 0 and (reached or stuck)


@dataclass(slots=True)
class RunState:
    """Progress of the run."""

    step: int = 0  #: training steps over all stages; also the version of the weights
    stage: int = 0  #: index of the current stage
    current: StageState = field(default_factory=StageState)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    best_step: int | None = None
    best_value: float | None = None
    seconds: dict[str, float] = field(default_factory=dict)  #: wall time by stage
    generated_tokens: int = 0
    generation_seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> RunState:
        return cls(**(data | {"current": StageState(**data["current"])}))
