"""Which split of a machine's cores is fastest: one process, or a trainer and some explorers, by simulation."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from rollmill.orchestrator.pacing import Pacing
from rollmill.planning.measurement import StepMeasurement
from rollmill.planning.prediction import StepPrediction, StepTimeModel, unattributed_seconds
from rollmill.planning.rollouts import draw_groups
from rollmill.planning.simulation import SimulationCosts, simulate_stage

_STEPS, _GROUPS = 120, 64
_ENDLESS = 10**6


@dataclass(frozen=True, slots=True)
class ProcessSplit:
    """A way to run a stage. No explorers: everything is in one process."""

    explorers: int
    max_staleness: int
    step_s: float
    tokens_per_second: float
    waits: float  #: share of its time that the trainer waits for rollouts

    @property
    def processes(self) -> int:
        """How many there are."""
        return 1 + self.explorers


def simulation_costs(model: StepTimeModel, prediction: StepPrediction) -> SimulationCosts:
    """What the simulation takes from measurements. Training times are spread as those of the largest measured batch."""
    found, groups = model.found, draw_groups(model.found, _GROUPS, seed=0)
    lengths = [length for group in groups for length in group.lengths]
    tokens, prompt = statistics.mean(lengths), statistics.mean(group.prompt for group in groups)
    if model.passes is None:
        pass_s, group_s = 0.0, 0.0
        row_s = prediction.seconds["rollout"] / prediction.generated
    else:
        pass_s = model.passes.step
        row_s = model.passes.token + model.passes.attended * (prompt + tokens / 2)
        group_s = model.passes.prompt * prompt * model.refill + model.overhead_s(prediction.groups) / prediction.groups
    train = sum(prediction.seconds.get(phase, 0.0) for phase in ("inference", "train", "other"))
    return SimulationCosts(
        [group.lengths for group in groups],
        [train * each for each in _spread([sample for sample in model.samples if sample.groups == model.sizes[-1]])],
        pass_s * model.refill,
        row_s * model.refill,
        group_s,
        statistics.median(sample.seconds.get("reward", 0.0) for sample in model.samples),
        found.publish_s,
        found.receive_s,
        0.0 if model.passes is None else model.passes.prompt * tokens / 2,
    )


def enumerate_splits(model: StepTimeModel, prediction: StepPrediction, processes: int) -> list[ProcessSplit]:
    """One process, and the trainer with one to `processes` - 1 explorers, for staleness 0, 1, 4 and the run file's."""
    stage = model.found.stage
    alone = prediction.seconds["total"]
    found = [ProcessSplit(0, stage.max_staleness, alone, prediction.tokens_per_second, 0.0)]
    if not prediction.generated:
        return found
    costs = simulation_costs(model, prediction)
    for explorers in _counts(processes - 1, prediction.groups):
        for staleness in sorted({0, 1, 4, stage.max_staleness}):
            pacing = Pacing(prediction.groups, staleness, _ENDLESS)
            done = simulate_stage(costs, pacing, explorers, steps=_STEPS, max_sequences=stage.rollout.max_sequences)
            step_s = done.step_s()
            waits = sum(done.waited) / done.ends[-1]
            found.append(ProcessSplit(explorers, staleness, step_s, prediction.generated / step_s, waits))
    return found


def choose_split(splits: Sequence[ProcessSplit], max_staleness: int) -> ProcessSplit:
    """The fastest with at most this staleness; of those within 2 % of it, the one with the fewest processes."""
    allowed = [split for split in splits if split.max_staleness <= max_staleness]
    fastest = min(split.step_s for split in allowed)
    return min(
        (split for split in allowed if split.step_s <= 1.02 * fastest),
        key=lambda split: (split.processes, split.max_staleness),
    )


def _counts(most: int, groups: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, 16 ... up to `most`; more explorers than the groups of some steps have nothing to do."""
    most = min(most, 8 * groups)
    usual = {power * factor // 2 for power in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512) for factor in (2, 3)}
    return sorted({count for count in usual if count <= most} | ({most} if most > 0 else set()))


def _spread(samples: Sequence[StepMeasurement]) -> list[float]:
    """Training times relative to their median."""
    times = [
        sum(sample.seconds.get(phase, 0.0) for phase in ("inference", "train")) + unattributed_seconds(sample)
        for sample in samples
    ]
    middle = statistics.median(times)
    return [each / middle for each in times]
