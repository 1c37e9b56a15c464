"""Predicts a stage's step in one process from measurements: seconds by phase and tokens per second."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from rollmill.apps.plan.planning.calibration import Calibration
from rollmill.apps.plan.planning.measurement import StepMeasurement
from rollmill.apps.plan.planning.rollouts import EngineStepCosts, GroupLengths, draw_groups, fit_line
from rollmill.config.workflows import SingleTurnWorkflow

_DRAWS = 8
_PHASES = ("rollout", "inference", "reward", "train", "move")


@dataclass(frozen=True)
class StepPrediction:
    """Prediction for one stage, as configured. Seconds are means per step; `other` is time outside all phases."""

    groups: int
    completions: int
    mean_tokens: float  #: new tokens of a completion
    max_tokens: int
    cut: float  #: share of measured completions truncated by the calibration's limit
    seconds: dict[str, float]  #: seconds by phase, with `other` and `total`
    full_train_s: float  #: training, if every completion has an advantage
    learned: float  #: share of measured completions with an advantage
    generated: float  #: new tokens of a step
    trained: float  #: tokens of the trainer's rows
    acted: float  #: tokens trained on

    @property
    def tokens_per_second(self) -> float:
        """New tokens, or tokens trained on, over the whole step, as in metrics.jsonl."""
        return (self.generated or self.acted) / self.seconds["total"]

    @property
    def decode_tokens_per_second(self) -> float | None:
        """New tokens over the rollout phase."""
        return self.generated / self.seconds["rollout"] if self.generated else None


class StepTimeModel:
    """Time model fitted to a stage's samples, for any number of groups."""

    def __init__(self, found: Calibration) -> None:
        self.found = found
        self.sizes = sorted({sample.groups for sample in found.samples})
        self.samples = [sample for size in self.sizes for sample in _faster_half(found.samples, size)]
        self.alone = isinstance(found.stage.workflow, SingleTurnWorkflow)
        self.passes: EngineStepCosts | None = None
        if found.rolls_out and self.alone:
            self.passes = EngineStepCosts.fitted([each for sample in self.samples for each in sample.passes])
        self.refill = _refill(found.samples)

    def by_groups(self, value: Callable[[StepMeasurement], float], groups: float) -> float:
        """Predicts a quantity that grows with the number of groups, by a line through the medians of each measured
        number.
        """
        constant, slope = fit_line(self.sizes, [self._median(value, size) for size in self.sizes])
        return constant + slope * groups

    def _median(self, value: Callable[[StepMeasurement], float], size: int) -> float:
        return statistics.median(value(sample) for sample in self.samples if sample.groups == size)

    def rollout_s(self, groups: Sequence[GroupLengths]) -> float:
        """Seconds of the rollout phase."""
        if self.passes is None:
            return self.by_groups(lambda sample: sample.seconds["rollout"], len(groups))
        decoding = self.passes.seconds(groups, self.found.stage.rollout.max_sequences)
        return self.refill * decoding + self.overhead_s(len(groups))

    def overhead_s(self, groups: float) -> float:
        """Seconds of the rollout phase outside engine steps."""
        return self.by_groups(_around_passes, groups)

    def phase_s(self, phase: str, groups: float) -> float:
        """Seconds of another phase."""
        if phase == "move":
            return statistics.median(sample.seconds.get("move", 0.0) for sample in self.samples)
        return self.by_groups(lambda sample: sample.seconds.get(phase, 0.0), groups)

    def other_s(self, groups: float) -> float:
        """Seconds outside all phases."""
        return self.by_groups(unattributed_seconds, groups)


def predict_step(model: StepTimeModel) -> StepPrediction:
    """Predicts a step of the stage."""
    found = model.found
    stage, groups = found.stage, found.stage.groups_per_step
    seconds, drawn = {}, []
    if found.rolls_out:
        drawn = [draw_groups(found, groups, seed) for seed in range(_DRAWS)]
        seconds["rollout"] = statistics.mean(model.rollout_s(each) for each in drawn)
        seconds["inference"] = model.phase_s("inference", groups)
        seconds["reward"] = model.phase_s("reward", groups)
    elif any("inference" in sample.seconds for sample in found.samples):
        seconds["inference"] = model.phase_s("inference", groups)
    seconds["train"] = model.phase_s("train", groups)
    if stage.offload is not None:
        seconds["move"] = model.phase_s("move", groups)
    seconds["other"] = model.other_s(groups)
    seconds["total"] = sum(seconds.values())
    lengths = [length for each in drawn for group in each for length in group.lengths]
    measured = sum(len(group) for sample in found.samples for group in sample.lengths)
    return StepPrediction(
        groups,
        len(lengths) // _DRAWS,
        float(np.mean(lengths)) if lengths else 0.0,
        max(lengths, default=0),
        sum(sample.cut for sample in found.samples) / measured
        if measured and found.longest < stage.rollout.max_new_tokens
        else 0.0,
        seconds,
        model.by_groups(lambda sample: sample.full_s, groups),
        statistics.mean(sample.learned for sample in found.samples),
        model.refill * sum(lengths) / _DRAWS,
        model.by_groups(lambda sample: sample.trained, groups),
        model.by_groups(lambda sample: sample.acted, groups),
    )


def _faster_half(samples: Sequence[StepMeasurement], size: int) -> list[StepMeasurement]:
    """Selects the faster half of the steps with this many groups: the first ones compile kernels and allocate
    memory.
    """
    own = sorted((sample for sample in samples if sample.groups == size), key=lambda sample: sample.seconds["total"])
    return own[: (len(own) + 1) // 2]


def _around_passes(sample: StepMeasurement) -> float:
    """Seconds of the rollout phase outside engine steps."""
    return max(sample.seconds["rollout"] - sum(each.seconds for each in sample.passes), 0.0)


def unattributed_seconds(sample: StepMeasurement) -> float:
    """Seconds of a step outside all phases."""
    return max(sample.seconds["total"] - sum(sample.seconds.get(phase, 0.0) for phase in _PHASES), 0.0)


def _refill(samples: Sequence[StepMeasurement]) -> float:
    """New tokens divided by tokens trained on: pipelines and workflows drop some."""
    kept = sum(sum(lengths) for sample in samples for lengths in sample.lengths)
    return max(1.0, sum(sample.generated for sample in samples) / kept) if kept else 1.0
