"""A simulated run with faults: processes that die and come back, links that break, a database that loses answers."""

from __future__ import annotations

import asyncio
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from sqlalchemy import Connection

from bench.simulation.invariants import IMPORT, PROGRESS, InvariantChecks, ViolationError
from bench.simulation.scenario import CLUSTERS, LOCAL, Fault, Scenario
from rollmill.apps.plan.simulation.clock import ProcessKilled, SimulationStuckError, VirtualLoop, virtual_time
from rollmill.apps.plan.simulation.components import SimulatedJudges, SimulatedWeights
from rollmill.apps.plan.simulation.explorers import SimulatedNode, SimulatedSite
from rollmill.apps.plan.simulation.history import EventHistory, SimulationEvent
from rollmill.apps.plan.simulation.network import SimulatedLink
from rollmill.apps.plan.simulation.stage import (
    SimulatedDisk,
    SimulatedRunSpec,
    SimulatedStage,
    SimulatedTrainerProcess,
)
from rollmill.buffer import Group
from rollmill.buffer.base import IMPORTED
from rollmill.buffer.database import Database, sqlite_url
from rollmill.buffer.memory import MemoryStore
from rollmill.buffer.sql import SqlStore
from rollmill.errors import TrainerRankLostError
from rollmill.types import Experience, Turn

_HEALTH_S, _RESTART_S, _LIVES = 10.0, 1.0, 30
_CLUSTER_HEALTH_S = 60.0
"""The default of `placement.health_s`: asking a thousand explorers more often takes most of a run's real time."""
_LONGEST_S = 3600.0
"""A run that takes longer than this has stopped for good: the longest of the scenarios takes some minutes."""
_HOST_SKEW_S = 3600.0


@dataclass
class Outcome:
    """How a simulated run ended."""

    digest: str  #: of its history
    seconds: float  #: virtual
    events: list[SimulationEvent]
    checks: InvariantChecks
    violation: ViolationError | None


class _LossyStore(MemoryStore):
    """A store in memory whose callers sometimes get no answer and ask again."""

    lost = 0

    def put(self, groups: Sequence[Group]) -> int:
        """See ExperienceStore."""
        made = super().put(groups)
        if groups and self.lost:
            self.lost -= 1
            return super().put(groups)
        return made


class _LossyDatabase(Database):
    """A database whose answers are sometimes lost after the commit: the transaction is made again."""

    lost = 0

    def _persist(self, work: Callable[[Connection], Any], *, write: bool, synced: bool = False) -> Any:
        made = super()._persist(work, write=write, synced=synced)
        if write and self.lost:
            self.lost -= 1
            return super()._persist(work, write=write, synced=synced)
        return made


@dataclass
class World:
    """Everything around the trainer's process in one simulated run."""

    scenario: Scenario
    loop: VirtualLoop
    folder: Path
    history: EventHistory = field(init=False)
    trainer: SimulatedTrainerProcess | None = None
    store: Any = None
    rank_dies: bool = False

    def __post_init__(self) -> None:
        scenario, loop = self.scenario, self.loop
        self.history, self.disk = EventHistory(loop), SimulatedDisk()
        self.checks = InvariantChecks(scenario)
        self.history.listeners.append(self.checks.look)
        loop.watchers.append(self.checks.after_turn)
        self.judges = SimulatedJudges(
            loop, scenario.judge_s, spread=0.5, places=scenario.judge_places, seed=scenario.seed
        )
        self.site = SimulatedSite(
            loop,
            scenario.costs,
            self.judges,
            SimulatedWeights(),
            self.history,
            scenario.config.rollout.max_sequences,
            scenario.weights_delay_s,
        )
        skews = np.random.default_rng(scenario.seed).normal(0.0, _HOST_SKEW_S, scenario.explorers)
        self.nodes = [
            SimulatedNode(
                f"explorer {number}",
                self.site,
                SimulatedLink(loop, scenario.delay_s, 1000 * scenario.seed + number),
                skew,
            )
            for number, skew in enumerate(skews)
        ]

    async def run(self) -> None:
        """Run to the end, through all faults. Raises ViolationError, and errors that no restart helps."""
        for node in self.nodes:
            node.start()
        for fault in self.scenario.faults:
            self.loop.call_at(fault.at, self._begin_fault, fault)
        for _ in range(_LIVES):
            if await self._one_life():
                self.checks.end()
                return
            await asyncio.sleep(_RESTART_S)
        raise ViolationError(PROGRESS, f"the trainer was started {_LIVES} times")

    async def _one_life(self) -> bool:
        """Run one process of the trainer; False if it was lost."""
        scenario = self.scenario
        self.store = self._open_store()
        placement = "local" if scenario.placement == LOCAL else scenario.placement
        spec = SimulatedRunSpec(
            scenario.config,
            scenario.seed,
            placement,
            scenario.tasks,
            scenario.ranks,
            scenario.checkpoint_every,
            _CLUSTER_HEALTH_S if scenario.explorers in CLUSTERS else _HEALTH_S,
        )
        self.trainer = SimulatedTrainerProcess(
            spec, self.site, self.disk, self.store, self.nodes, shared=scenario.shared, began=self._began
        )
        task = self.trainer.process.spawn(self.trainer.run())
        await asyncio.wait([task])
        lost = not self.trainer.process.alive
        await self.trainer.process.kill()
        for node in self.nodes:
            node.link.break_streams()
        self.store.close()
        if lost or task.cancelled():
            self.checks.stage = None
            return False
        error = task.exception()
        if error is None:
            return True
        if isinstance(error, TrainerRankLostError):  # nothing else that happens here is a reason to end
            self.history.record("restart", error=type(error).__name__)
            self.checks.stage = None  # until the next one has begun, perhaps from an older version
            return False
        raise error

    def _began(self, stage: SimulatedStage) -> None:
        self.checks.stage = stage
        stage.simulated_trainer.rank_dies, self.rank_dies = self.rank_dies, False

    def _open_store(self) -> Any:
        replay = self.scenario.config.buffer.replay
        if self.scenario.store == "memory":
            return _LossyStore(keep=0 if replay is None else replay.capacity)
        return SqlStore(_LossyDatabase(sqlite_url(self.folder / "buffer.sqlite")), "simulated")

    # -- faults ------------------------------------------------------------------------------------------------

    def _begin_fault(self, fault: Fault) -> None:
        self.history.record("fault", what=fault.kind, node=fault.node)
        node = self.nodes[fault.node] if self.nodes else None
        if fault.kind == "trainer":
            self._kill_trainer()
        elif fault.kind == "rank":
            self._kill_rank()
        elif fault.kind == "judge":
            self.judges.away_until = self.loop.time() + fault.seconds
        elif fault.kind == "database" and self.store is not None:
            (self.store if self.scenario.store == "memory" else self.store.database).lost += 1
        elif fault.kind == "import":
            self._import_group()
        elif node is not None:
            self._begin_node_fault(fault, node)

    def _begin_node_fault(self, fault: Fault, node: SimulatedNode) -> None:
        match fault.kind:
            case "explorer":
                self.loop.create_task(node.crash())
            case "partition":
                node.link.held_until = self.loop.time() + fault.seconds
            case "slow":
                node.set_slowness(fault.factor)
                self.loop.call_later(fault.seconds, node.set_slowness, 1.0)
            case "break":
                node.link.breaks += 1
            case "duplicate":
                node.link.duplicates += 1

    def _kill_trainer(self) -> None:
        if self.trainer is not None and self.trainer.process.alive:
            self.loop.create_task(self.trainer.process.kill())

    def _kill_rank(self) -> None:
        stage = None if self.trainer is None else self.trainer.stage
        if stage is not None and self.scenario.ranks > 1:
            stage.simulated_trainer.rank_dies = True

    def _import_group(self) -> None:
        """Put a group of another process, of some version up to now, into the shared store."""
        if self.checks.stage is None:
            return
        number, version = len(self.history.events), self.checks.stage.version
        version = max(0, version - number % 4)
        name = f"{IMPORT}{number}"
        made = [_imported(f"{name}/{index}", name, version) for index in range(self.scenario.config.rollout.group_size)]
        self.store.put([Group(name, made, writer=IMPORTED)])


def _imported(id: str, group: str, version: int) -> Experience:
    tokens, policy = np.arange(4, dtype=np.int32), np.array([False, True, True, True])
    return Experience(
        id=id,
        task_id="t0",
        group=group,
        token_ids=tokens,
        action_mask=policy,
        logprobs=np.where(policy, -1.0, 0.0).astype(np.float32),
        versions=np.where(policy, version, -1).astype(np.int32),
        reward=float(id[-1] == "0"),
        reward_parts={"judge": float(id[-1] == "0")},
        turns=[Turn("prompt", 0, 1, "?"), Turn("assistant", 1, 4, "")],
    )


def simulate_scenario(scenario: Scenario, *, compared: InvariantChecks | None = None) -> Outcome:
    """Run a scenario, and compare it with the same run undisturbed, if that is given."""
    with tempfile.TemporaryDirectory(prefix="simulation-", dir=_memory()) as folder, virtual_time() as loop:
        world = World(scenario, loop, Path(folder))
        violation = _violation(world, loop)
        if violation is None and compared is not None:
            try:
                world.checks.compare(compared)
            except ViolationError as error:
                violation = error
        events, world.history.listeners, loop.watchers = world.history.events, [], []
        return Outcome(world.history.digest(), loop.time(), events, world.checks, violation)


def _memory() -> Path | None:
    """A file system in memory, where a SQLite file costs little."""
    found = Path("/dev/shm")
    return found if found.is_dir() else None


def _violation(world: World, loop: VirtualLoop) -> ViolationError | None:
    try:
        loop.run_until_complete(asyncio.wait_for(world.run(), _LONGEST_S))
    except ViolationError as error:
        return error
    except (TimeoutError, SimulationStuckError) as error:
        return ViolationError(PROGRESS, f"the run stands still: {str(error) or f'{_LONGEST_S:.0f} s are over'}")
    except (Exception, ProcessKilled) as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        why = str(error).replace(str(world.folder), "RUN")
        return ViolationError(PROGRESS, f"the run failed in {where.name}: {type(error).__name__}: {why}")
    return None


def simulate_seed(scenario: Scenario) -> Outcome:
    """Run a scenario undisturbed and, if it has faults, with them; returns the run that violates an invariant, or the
    last one."""
    if not scenario.faults:
        return simulate_scenario(scenario)
    quiet = simulate_scenario(scenario.undisturbed())
    if quiet.violation is not None:
        return quiet
    return simulate_scenario(scenario.disturbed(quiet.seconds), compared=quiet.checks)
