"""Rollouts of explorers in other processes, which end in any order: fresh enough, used once, and never lost."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.buffer_groups import experience, group

from rollmill.buffer.base import IMPORTED
from rollmill.buffer.memory import MemoryStore
from rollmill.buffer.offline_data import RatingOverrides
from rollmill.config.run import StageConfig
from rollmill.data import Taskset, build_sampler
from rollmill.data.samplers.builtin.epochs import ShuffledSampler
from rollmill.errors import DeadlineError
from rollmill.orchestrator.batches import RolloutBatches, RolloutComponents
from rollmill.orchestrator.scheduler import RolloutScheduler
from rollmill.orchestrator.state import RunState, StageState
from rollmill.pipelines import Pipeline
from rollmill.trackers.trace import Trace
from rollmill.types import Experience, Task

TASKS = Taskset("numbers", [Task(id=f"t{n}", prompt=f"{n}+1=") for n in range(50)], [])
BY_ID = {task.id: task for task in TASKS.tasks}


@dataclass
class Scripted:
    """Remote explorers whose groups end in a random order; their tokens are of the version they began with."""

    chance: random.Random
    version: int = 0
    tokens_generated: int = 0
    is_remote: bool = True
    running: dict[str, asyncio.Future[None]] = field(default_factory=dict)

    async def rollout(self, task: Task, *args: Any, group: str, **others: Any) -> list[Experience]:
        version, self.running[group] = self.version, asyncio.get_running_loop().create_future()
        try:
            await self.running[group]
        finally:
            del self.running[group]
        return [replace(experience(f"{group}/0", version=version), task_id=task.id)]

    async def work(self) -> None:
        while True:
            pending = [name for name, future in self.running.items() if not future.done()]
            if pending:
                self.running[self.chance.choice(pending)].set_result(None)
            await asyncio.sleep(0)

    def take_counts(self) -> dict[str, float]:
        return {}


class Trainer:
    """A trainer's process: batches of a stage, and a checkpoint that survives it."""

    def __init__(self, config: StageConfig, store: MemoryStore, chance: random.Random) -> None:
        self.config, self.store, self.explorer = config, store, Scripted(chance)
        sampler = build_sampler(TASKS, ShuffledSampler(), 0, batch=config.rollout.batch)
        rollouts = RolloutScheduler(
            config,
            sampler=sampler,
            explorer=self.explorer,
            engine=self.explorer,
            store=store,
            task=BY_ID.__getitem__,
            first_version=0,
            seed=0,
        )
        line = RolloutComponents(sampler, rollouts, Pipeline([]), store, Trace(), None, "", 0, BY_ID.__getitem__)
        self.batches = RolloutBatches(config, line, RatingOverrides([]), first_version=0, seed=0, shared=True)
        self.state = StageState()

    def restore(self, checkpoint: str) -> None:
        self.state = RunState.from_json(json.loads(checkpoint)).current
        self.batches.restore(self.state)
        self.batches.mark(self.state)

    async def step(self) -> list[str]:
        """Make a step; returns the names of its groups."""
        version = self.explorer.version = self.state.step
        working = asyncio.ensure_future(self.explorer.work())
        try:
            await self.batches.roll_out(version)
            taken = await self.batches.take(version)
        finally:
            working.cancel()
        assert all(version - each.oldest_version <= self.config.max_staleness for each in taken)
        self.state.step += 1
        self.batches.mark_trained(self.state.step)
        self.batches.mark(self.state)
        return [each.group for each in taken]

    async def checkpoint(self) -> str:
        await self.batches.snapshot(self.state)
        return json.dumps(asdict(RunState(current=self.state)))


def stage(batch: int, staleness: int, steps: int, deadline_s: float = 60) -> StageConfig:
    rollout = {"batch": batch, "group_size": 1, "deadline_s": deadline_s}
    return StageConfig(name="x", steps=steps, max_staleness=staleness, rollout=rollout)  # type: ignore[arg-type]


@settings(max_examples=25)
@given(
    batch=st.integers(1, 3),
    staleness=st.integers(0, 3),
    seed=st.integers(0, 99),
    kills=st.lists(st.booleans(), min_size=6, max_size=6),
)
def test_a_trainer_that_is_resumed_makes_every_group_once(
    batch: int, staleness: int, seed: int, kills: list[bool]
) -> None:
    async def happens() -> None:
        config, chance = stage(batch, staleness, 6), random.Random(seed)
        store, learned = MemoryStore(), list[str]()
        trainer = Trainer(config, store, chance)
        trainer.batches.mark(trainer.state)
        for killed in kills:
            learned += await trainer.step()
            checkpoint = await trainer.checkpoint()  # does not wait for what is running
            if killed:
                await trainer.batches.close()
                trainer = Trainer(config, store, chance)
                trainer.restore(checkpoint)
        await trainer.batches.close()
        assert learned == [f"x-{number:06d}" for number in range(6 * batch)]  # in order, none twice, none missing

    asyncio.run(happens())


def test_groups_that_others_put_into_the_buffer_end_the_wait() -> None:
    """Without any explorer: what is put while the trainer waits makes a step, unless it is too stale."""

    async def happens() -> None:
        store = MemoryStore()
        trainer = Trainer(stage(2, 1, 4), store, random.Random(0))
        trainer.batches.mark(trainer.state)
        trainer.state.step = 3
        waits = asyncio.ensure_future(trainer.batches.roll_out(3))
        await asyncio.sleep(0.01)
        store.put([group("old", version=1), group("a", version=2)])
        await asyncio.sleep(0.01)
        assert not waits.done()
        store.put([group("b", version=3)])
        await waits
        taken = await trainer.batches.take(3)
        assert list(dict.fromkeys(each.group for each in taken)) == ["a", "b"]
        assert trainer.batches.metrics()["raw/late"] == 1
        await trainer.batches.close()

    asyncio.run(happens())


def test_a_resumed_run_keeps_the_order_of_groups_when_others_have_come_first() -> None:
    """The second group is finished at the checkpoint, and an imported one has the place of the first."""

    async def happens() -> None:
        store, config = MemoryStore(), stage(2, 0, 4)
        killed = Trainer(config, store, random.Random(0))
        starts = asyncio.ensure_future(killed.batches.roll_out(0))
        await asyncio.sleep(0.01)
        killed.batches.mark(killed.state)
        killed.explorer.running["x-000001"].set_result(None)
        await asyncio.sleep(0.01)
        checkpoint = await killed.checkpoint()
        starts.cancel()
        await killed.batches.close()
        store.put([group("imported", version=0, writer=IMPORTED)])
        trainer = Trainer(config, store, random.Random(0))
        trainer.restore(checkpoint)
        assert list(dict.fromkeys(await trainer.step())) == ["imported", "x-000000"]
        await trainer.batches.close()

    asyncio.run(happens())


def test_a_wait_for_explorers_has_a_deadline() -> None:
    async def happens() -> None:
        trainer = Trainer(stage(2, 0, 4, deadline_s=0.01), MemoryStore(), random.Random(0))
        with pytest.raises(DeadlineError, match="waited 0 s for explorers to finish their rollouts"):
            await trainer.batches.roll_out(0)
        await trainer.batches.close()

    asyncio.run(happens())
