"""A simulated stage and the trainer process that runs it: the real stage, loop, scheduler, batches and buffer.

Only what is built differs: engine, rewards, trainer, weights and processes are simulated.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rollmill.apps.plan.simulation.clock import SimulatedProcess
from rollmill.apps.plan.simulation.components import (
    SimulatedBuffers,
    SimulatedPolicy,
    SimulatedRewards,
    SimulatedSender,
    SimulatedTrainer,
    simulated_tasks,
)
from rollmill.apps.plan.simulation.engine import SimulatedEngine
from rollmill.apps.plan.simulation.explorers import (
    JoiningFleet,
    RayLikeFleet,
    SimulatedNode,
    SimulatedRollouts,
    SimulatedSite,
)
from rollmill.buffer import ExperienceStore
from rollmill.config.run import StageConfig
from rollmill.orchestrator.components import build_rollouts, build_stage_pipeline
from rollmill.orchestrator.context import RunContext
from rollmill.orchestrator.loop import train_step
from rollmill.orchestrator.phases import PhaseTrace
from rollmill.orchestrator.stages import Stage
from rollmill.orchestrator.state import StageState
from rollmill.orchestrator.step_meter import StepMeter
from rollmill.orchestrator.task_pictures import TaskPictures
from rollmill.orchestrator.task_selection import StageTasks
from rollmill.remote.rollouts import RemoteRollouts
from rollmill.seeds import derive_seed

_NOWHERE = Path("/nonexistent")


@dataclass(frozen=True)
class SimulatedRunSpec:
    """Stage and processes of a simulated run."""

    config: StageConfig
    seed: int
    placement: str  #: local, ray or joined
    tasks: int  #: of the taskset
    ranks: int = 1
    checkpoint_every: int = 1
    health_s: float = 60.0
    replacements: int = 1000


@dataclass
class SimulatedDisk:
    """Checkpoints of a run by step, as text: what survives a process."""

    checkpoints: dict[int, str] = field(default_factory=dict)

    def write(self, step: int, state: StageState, trainer: dict[str, Any]) -> None:
        self.checkpoints[step] = json.dumps({"state": asdict(state), "trainer": trainer})

    def newest(self) -> tuple[StageState, dict[str, Any]] | None:
        if not self.checkpoints:
            return None
        found = json.loads(self.checkpoints[max(self.checkpoints)])
        return StageState(**found["state"]), found["trainer"]


class _LocalBackend(SimulatedRollouts):
    """Rollouts in the trainer's process with a simulated engine."""

    def __init__(self, stage: SimulatedStage) -> None:
        self._simulated_policy, digests = stage.simulated_policy, dict[int, int]()
        rollout = stage.config.rollout
        engine = SimulatedEngine(
            stage.process, stage.site.costs, digests, max_sequences=rollout.max_sequences, shares_loop=True
        )
        super().__init__(stage.simulated_policy, engine, stage.rewards)
        self._digests = digests

    def publish(self, version: int) -> None:
        self._digests[version] = self._simulated_policy.digest
        super().publish(version)


class _RemoteBackend(RemoteRollouts):
    """Rollouts by simulated explorers."""

    def _open(self, stage: Stage) -> Any:
        assert isinstance(stage, SimulatedStage)
        self._name = f"use {derive_seed(stage.seed, len(stage.site.weights.digests)):x}"
        engine = SimulatedEngine(stage.process, stage.site.costs, {}, max_sequences=1, shares_loop=True)
        sender = SimulatedSender(stage.site.weights, self._name, stage.simulated_policy, stage.process)
        return engine, self._name, sender


class SimulatedStage(Stage):
    """The real stage with simulated parts."""

    def __init__(
        self,
        spec: SimulatedRunSpec,
        site: SimulatedSite,
        process: SimulatedProcess,
        store: ExperienceStore,
        fleet: Any,
        *,
        shared: bool,
    ) -> None:
        policy: Any = SimulatedPolicy()
        buffers: Any = SimulatedBuffers(store, shared=shared)
        self.site, self.process, self.simulated_policy = site, process, policy
        self.config, self.policy = spec.config, policy
        self.tasks = StageTasks(simulated_tasks(spec.tasks), None, {}, [])
        self.context = RunContext(_NOWHERE, "simulated", spec.seed, "fp32", 1, buffers, explorers=fleet)
        self.index, self.first_version, self.seed = 0, 0, derive_seed(spec.seed, 0)
        self.state = StageState()
        self.trace = PhaseTrace(self._report)
        self.offload_plan = None
        rewards: Any = SimulatedRewards(site.judges, process.outages)
        self.rewards = rewards
        self.simulated_trainer = SimulatedTrainer(
            policy, process, site.costs, site.history, ranks=spec.ranks, seed=spec.seed
        )
        trainer: Any = self.simulated_trainer
        self.trainer, self.updating, self.privileged = trainer, False, None
        self.train_thread = ThreadPoolExecutor(1, "simulated")  # starts no thread: a virtual loop runs its work itself
        self.pictures = TaskPictures(policy, ())
        self.backend = _LocalBackend(self) if fleet is None else _RemoteBackend(self, fleet)
        self.backend.publish(self.first_version)
        self.offloader = self.offline_data = self.drafts = None
        self.store = store
        self.pipeline = build_stage_pipeline(spec.config, policy, self.seed)
        self.batches, self.evaluator = build_rollouts(self)
        self.meter = StepMeter(self)

    def finish_step(self) -> None:
        self.process.require_alive()
        super().finish_step()
        self.site.history.record("publish", version=self.version, digest=self.simulated_policy.digest)


class SimulatedTrainerProcess:
    """One process of the trainer: from the newest checkpoint to the end of the run, unless it dies.

    Args:
        nodes: the explorers; none: rollouts are made in this process.
        shared: other processes put groups into the store, too.
        began: called with the stage, once it has started or resumed.
    """

    def __init__(
        self,
        spec: SimulatedRunSpec,
        site: SimulatedSite,
        disk: SimulatedDisk,
        store: ExperienceStore,
        nodes: list[SimulatedNode],
        *,
        shared: bool = False,
        began: Callable[[SimulatedStage], None] = lambda stage: None,
    ) -> None:
        self.process = SimulatedProcess(site.loop, "trainer")
        self._spec, self._site, self._disk, self._store = spec, site, disk, store
        self._nodes, self._shared, self._began = nodes, shared, began
        self.stage: SimulatedStage | None = None
        self.results: list[dict[str, Any]] = []  #: metrics and seconds of its steps

    async def run(self) -> None:
        """Make the remaining steps. Raises whatever the run raises."""
        resumed, spec = self._disk.newest(), self._spec
        fleet = self._fleet()
        if fleet is not None and resumed is not None:
            fleet.drop_requests()
        stage = SimulatedStage(spec, self._site, self.process, self._store, fleet, shared=self._shared)
        self.stage = stage
        try:
            if resumed is None:
                stage.begin({})
            else:
                stage.restore(*resumed)
            self._site.history.record("begin", version=stage.version, digest=stage.simulated_policy.digest)
            self._began(stage)
            while not stage.done:
                result = await train_step(stage)
                self._site.history.record("step", version=stage.version)
                trained_s = stage.simulated_trainer.spent_s
                self.results.append({**result.metrics, "seconds": result.seconds, "trained_s": trained_s})
                if stage.state.step % spec.checkpoint_every == 0 or stage.state.step == spec.config.steps:
                    await self._checkpoint(stage)
        finally:
            await stage.close()

    async def _checkpoint(self, stage: SimulatedStage) -> None:
        state = await stage.snapshot()
        self.process.require_alive()
        self._disk.write(state.step, state, stage.trainer_state())
        self._site.history.record("checkpoint", step=state.step)

    def _fleet(self) -> RayLikeFleet | JoiningFleet | None:
        match self._spec.placement:
            case "local":
                return None
            case "joined":
                return JoiningFleet(self._nodes, self.process)
        health, left = self._spec.health_s, self._spec.replacements
        return RayLikeFleet(self._nodes, self.process, health_s=health, replacements=left)
