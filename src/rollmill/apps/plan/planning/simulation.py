"""Simulates the steps of a run with remote explorers, event by event, and chooses the fastest split into processes.

The trainer admits groups by the pacing rule, each to the explorer with the least work, waits for the oldest batch,
trains and publishes; explorers continue meanwhile. An explorer decodes all of its completions together: a pass gives
each of them a token, and takes longer the more there are. This is fast, for many splits; `simulation/` runs the
orchestrator's own code, and tests compare the two.
"""

from __future__ import annotations

import heapq
import random
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from rollmill.apps.plan.planning.measurement import StepMeasurement
from rollmill.apps.plan.planning.prediction import StepPrediction, StepTimeModel, unattributed_seconds
from rollmill.apps.plan.planning.rollouts import draw_groups
from rollmill.apps.plan.simulation.engine import SimulationCosts
from rollmill.orchestrator.pacing import Pacing


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """Numbers of each step: end, staleness of its stalest group, waiting and training time of the trainer."""

    ends: list[float]
    staleness: list[int]
    waited: list[float]
    trained: list[float]

    def step_s(self) -> float:
        """Mean seconds of a step over the second half, without the start-up."""
        half = len(self.ends) // 2
        return (self.ends[-1] - self.ends[half - 1]) / (len(self.ends) - half)


def simulate_stage(
    costs: SimulationCosts,
    pacing: Pacing,
    explorers: int,
    *,
    steps: int | None = None,
    max_sequences: int = 256,
    seed: int = 0,
    beside: bool = True,
) -> SimulationResult:
    """Simulates the steps of a stage.

    Args:
        pacing: the pacing rule.
        explorers: number of explorers.
        steps: number of steps to simulate; default: all. The last steps of a stage are short, since no later rollouts
            start.
        max_sequences: completions that an explorer decodes at a time.
        seed: seed of the draws.
        beside: explorers have their own processes; otherwise there is one, which pauses while the trainer works.
    """
    source, times, found = random.Random(seed), random.Random(seed), SimulationResult([], [], [], [])
    pool = [_SimulatedExplorer(costs, max_sequences) for _ in range(explorers if beside else 1)]
    queue: deque[_SimulatedGroup] = deque()
    now = 0.0
    for step in range(pacing.steps if steps is None else steps):
        while pacing.may_start(step, len(queue)):
            one = min(pool, key=lambda each: each.groups)
            queue.append(one.start(source.choice(costs.groups), step))
        taken = [queue.popleft() for _ in range(pacing.batch)]
        awaited = taken if beside else [*taken, *queue]
        ready = max(now, *(group.explorer.finish(group) + costs.judge_s for group in awaited))
        trained = times.choice(costs.train_s)
        found.waited.append(ready - now)
        now = ready + trained + costs.publish_s
        found.ends.append(now)
        found.staleness.append(step - min(group.version for group in taken))
        found.trained.append(trained)
        for one in pool:
            one.advance(now, rests=not beside)
            one.take_weights()
    return found


@dataclass(slots=True, eq=False)
class _SimulatedGroup:
    explorer: _SimulatedExplorer
    version: int
    left: int  # completions that have not ended
    ended: float = 0.0


@dataclass(slots=True)
class _SimulatedExplorer:
    """An explorer's running completions. `now` is its simulated time, `passes` the number of passes until then."""

    costs: SimulationCosts
    max_sequences: int
    now: float = 0.0
    passes: float = 0.0
    busy_s: float = 0.0  #: other work, done before the next pass
    groups: int = 0  #: running groups
    _rows: list[tuple[float, int, _SimulatedGroup]] = field(
        default_factory=list
    )  # the pass that ends it, a number, its group
    _waiting: deque[tuple[int, _SimulatedGroup]] = field(default_factory=deque)
    _number: int = 0

    def start(self, lengths: Sequence[int], version: int) -> _SimulatedGroup:
        group = _SimulatedGroup(self, version, len(lengths))
        self.busy_s += self.costs.group_s
        self.groups += 1
        self._waiting.extend((length, group) for length in lengths)
        self._fill()
        return group

    def finish(self, group: _SimulatedGroup) -> float:
        """Runs until the group has all its tokens; returns that time."""
        while group.left:
            self._to_next_end()
        return group.ended

    def advance(self, until: float, *, rests: bool = False) -> None:
        """Runs until that time, or pauses until then."""
        if rests:
            self.now = until
        while self._rows and self.now + self._next_s() <= until:
            self._to_next_end()
        room = max(until - self.now, 0.0)
        other = min(room, self.busy_s)
        self.busy_s -= other
        if self._rows:
            self.passes += (room - other) / self._pass_s()
        self.now = max(self.now, until)

    def take_weights(self) -> None:
        self.busy_s += self.costs.receive_s + self.costs.recompute_s * len(self._rows)

    def _pass_s(self) -> float:
        return self.costs.pass_s + self.costs.row_s * len(self._rows)

    def _next_s(self) -> float:
        return self.busy_s + (self._rows[0][0] - self.passes) * self._pass_s()

    def _to_next_end(self) -> None:
        self.now += self._next_s()
        self.busy_s = 0.0
        self.passes, _, group = heapq.heappop(self._rows)
        group.left -= 1
        if not group.left:
            group.ended = self.now
            self.groups -= 1
        self._fill()

    def _fill(self) -> None:
        while self._waiting and len(self._rows) < self.max_sequences:
            length, group = self._waiting.popleft()
            self._number += 1
            heapq.heappush(self._rows, (self.passes + length, self._number, group))


_STEPS, _GROUPS = 120, 64
_ENDLESS = 10**6


@dataclass(frozen=True, slots=True)
class ProcessSplit:
    """A split of a stage into processes. No explorers: everything runs in one process."""

    explorers: int
    max_staleness: int
    step_s: float
    tokens_per_second: float
    waits: float  #: share of its time that the trainer waits for rollouts

    @property
    def processes(self) -> int:
        return 1 + self.explorers


def simulation_costs(model: StepTimeModel, prediction: StepPrediction) -> SimulationCosts:
    """Derives the simulation's costs from measurements. Training times vary as in the largest measured batch."""
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
    """Simulates one process, and 1 to `processes` - 1 explorers, with staleness 0, 1, 4 and the run file's."""
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
    """Returns the fastest split with at most this staleness; of those within 2 % of it, the one with the fewest
    processes.
    """
    allowed = [split for split in splits if split.max_staleness <= max_staleness]
    fastest = min(split.step_s for split in allowed)
    return min(
        (split for split in allowed if split.step_s <= 1.02 * fastest),
        key=lambda split: (split.processes, split.max_staleness),
    )


def _counts(most: int, groups: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, 16 ... up to `most`, at most 8 explorers per group."""
    most = min(most, 8 * groups)
    counts = {power * factor // 2 for power in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512) for factor in (2, 3)}
    return sorted({count for count in counts if count <= most} | ({most} if most > 0 else set()))


def _spread(samples: Sequence[StepMeasurement]) -> list[float]:
    """Training times relative to their median."""
    times = [
        sum(sample.seconds.get(phase, 0.0) for phase in ("inference", "train")) + unattributed_seconds(sample)
        for sample in samples
    ]
    middle = statistics.median(times)
    return [each / middle for each in times]
