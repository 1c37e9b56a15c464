"""Steps of a run without faults on virtual time: how fast the orchestrator's own code makes them with given costs."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from rollmill.apps.plan.simulation.clock import virtual_time
from rollmill.apps.plan.simulation.components import SimulatedJudges, SimulatedWeights
from rollmill.apps.plan.simulation.engine import SimulationCosts
from rollmill.apps.plan.simulation.explorers import SimulatedNode, SimulatedSite
from rollmill.apps.plan.simulation.history import EventHistory
from rollmill.apps.plan.simulation.network import SimulatedLink
from rollmill.apps.plan.simulation.stage import SimulatedDisk, SimulatedRunSpec, SimulatedTrainerProcess
from rollmill.buffer.memory import MemoryStore
from rollmill.config.buffer import BufferConfig
from rollmill.config.run import StageConfig

DELAY_S = 1e-3
"""Delay of a message between two hosts, connection and pickling included."""
_ENDLESS_S = 1e9
_JUDGES = 1024


@dataclass(frozen=True, slots=True)
class SimulatedSteps:
    """Numbers of each step: its end in virtual seconds, staleness of its stalest token, waiting of the trainer."""

    ends: list[float]
    staleness: list[float]
    waited: list[float]

    def step_s(self) -> float:
        """Mean seconds of a step over the second half, without the start-up."""
        half = len(self.ends) // 2
        return (self.ends[-1] - self.ends[half - 1]) / (len(self.ends) - half)

    def waits(self) -> float:
        """Share of its time that the trainer waits for rollouts, over the second half."""
        half = len(self.ends) // 2
        return sum(self.waited[half:]) / (self.ends[-1] - self.ends[half - 1])


def simulate_steps(
    stage: StageConfig, costs: SimulationCosts, explorers: int, *, steps: int, max_sequences: int, seed: int = 0
) -> SimulatedSteps:
    """Simulate the first steps of a stage with explorers of their own processes.

    Scheduler, pacing, batches, buffer, worker pool and workers are the real ones. Operators, replay, evaluations and
    checkpoints are left out, and every group is kept.
    """
    rollout = stage.rollout.model_copy(
        update={"deadline_s": _ENDLESS_S, "token_budget": None, "reuse": None, "max_new_tokens": 1 << 20}
    )
    # steps after the last one: a stage's end, with fewer and fewer groups under way, is not part of the measurement
    more = {"steps": steps + stage.max_staleness + 1, "pipeline": [], "evaluation": None, "offload": None}
    config = stage.model_copy(update={**more, "rollout": rollout, "buffer": BufferConfig(store="memory")})
    tasks = 2 * rollout.batch
    with virtual_time() as loop:
        history, judges = (
            EventHistory(loop),
            SimulatedJudges(loop, costs.judge_s, spread=0.0, places=_JUDGES, seed=seed),
        )
        site = SimulatedSite(loop, costs, judges, SimulatedWeights(), history, max_sequences)
        nodes = [
            SimulatedNode(f"explorer {number}", site, SimulatedLink(loop, DELAY_S, seed + number))
            for number in range(explorers)
        ]
        for node in nodes:
            node.start()
        spec = SimulatedRunSpec(config, seed, "ray", tasks, checkpoint_every=config.steps, health_s=_ENDLESS_S)
        trainer = SimulatedTrainerProcess(spec, site, SimulatedDisk(), MemoryStore(), nodes)
        loop.run_until_complete(asyncio.wait_for(trainer.process.spawn(trainer.run()), None))
    ends = [event.at for event in history.events if event.kind == "step"][:steps]
    results = trainer.results[:steps]
    waited = [each["seconds"]["total"] - each["trained_s"] for each in results]
    return SimulatedSteps(ends, [each["staleness/max"] for each in results], waited)
