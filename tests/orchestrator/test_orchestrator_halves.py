"""Explorers beside a trainer, in any order of events: no group is too stale, learned from twice, or lost."""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from buffer_groups import experience, group
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmill.buffer import DATABASE_FILE
from rollmill.buffer.base import EXPLORER, REMOTE_EXPLORER
from rollmill.buffer.database import Database, sqlite_url
from rollmill.buffer.experts import RatingOverrides
from rollmill.buffer.sql import SqlStore
from rollmill.config.orders import ShuffledOrder
from rollmill.config.run import StageConfig
from rollmill.data import Taskset, build_sampler
from rollmill.errors import DeadlineError
from rollmill.orchestrator.batch_reader import BatchReader
from rollmill.orchestrator.batches import RolloutComponents
from rollmill.orchestrator.scheduler import RolloutScheduler
from rollmill.pipelines import Pipeline
from rollmill.remote import explorer_stage
from rollmill.remote.explorer_stage import SharedRolloutProducer
from rollmill.remote.run_state import EXPLORERS, TRAINER_STATUS, TrainerStatus, describe_explorers, remove_run_state
from rollmill.remote.trainer_stage import RemoteBatches
from rollmill.remote.worker_slots import SILENT_S, WorkerSlot, WorkerState, acquire_worker_slot
from rollmill.rollout.runner import REJECTION_REASON_KEY
from rollmill.trackers.heartbeat import HeartbeatWriter
from rollmill.trackers.trace import Trace
from rollmill.types import Experience, Task

TASKS = Taskset("numbers", [Task(id=f"t{n}", prompt=f"{n}+1=") for n in range(50)], [])


@pytest.fixture(autouse=True)
def always_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explorer_stage, "POLL_BUFFER_S", -1.0)


@dataclass
class Scripted:
    """An explorer whose groups end when it is told; their tokens are of the version they began with."""

    version: int = 0
    tokens_generated: int = 0
    is_remote: bool = False
    ending: dict[str, asyncio.Future[bool]] = field(default_factory=dict)

    async def rollout(self, task: Task, *args: Any, group: str, **others: Any) -> list[Experience]:
        version, self.ending[group] = self.version, asyncio.get_running_loop().create_future()
        kept = await self.ending[group]
        made = replace(experience(f"{group}/0", version=version), task_id=task.id)
        made.info |= {} if kept else {REJECTION_REASON_KEY: "asked to"}
        return [made]

    def take_counts(self) -> dict[str, float]:
        return {}


@dataclass
class Living:
    """An explorer's process."""

    place: WorkerSlot
    stack: ExitStack
    scripted: Scripted
    production: SharedRolloutProducer


class World:
    """A trainer and explorers that share a folder."""

    def __init__(self, folder: Path, *, batch: int, staleness: int, steps: int) -> None:
        rollout = {"batch": batch, "group_size": 1, "deadline_s": 0.01, "refills": 1000}
        self.config = StageConfig(name="x", steps=steps, max_staleness=staleness, rollout=rollout)  # type: ignore[arg-type]
        self.folder, self.version, self.checkpoint = folder, 0, 0
        self.notice = TrainerStatus("id", 0, 0)
        self.notice.write(folder)
        self.store = SqlStore(Database(sqlite_url(folder / DATABASE_FILE)), "id")
        self.heart = HeartbeatWriter(folder, "trainer")
        self.explorers: dict[int, Living] = {}
        self.learned: dict[int, list[str]] = {}
        self.most = 0
        self.mark = self.store.mark()

    def join(self) -> None:
        stack = ExitStack()
        own = stack.enter_context(acquire_worker_slot(self.folder))
        scripted = Scripted(self.version)
        sampler = build_sampler(TASKS, ShuffledOrder(), own.number, batch=self.config.rollout.batch)
        rollouts = RolloutScheduler(
            self.config,
            sampler=sampler,
            explorer=scripted,
            engine=scripted,
            store=self.store,
            task={task.id: task for task in TASKS.tasks}.__getitem__,
            first_version=0,
            seed=own.number,
            uses_greedy=False,
            prefix=f"x.{own.number}",
        )
        line = RolloutComponents(
            sampler, rollouts, Pipeline([]), self.store, Trace(), None, "", 0, lambda id: TASKS.tasks[0]
        )
        assert own.number not in self.explorers
        production = SharedRolloutProducer(self.config, line, self.notice, own)
        self.explorers[own.number] = Living(own, stack, scripted, production)

    async def die(self, living: Living) -> None:
        """Killed: what it has said stays, its lock does not."""
        del self.explorers[living.place.number]
        said = living.place.load(0)
        await living.production.close()
        assert living.place.load(0) == said
        living.stack.close()

    async def start(self, living: Living) -> None:
        living.production.start(living.scripted.version)
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    async def finish(self, living: Living, kept: bool) -> None:
        oldest = living.production._queue.first(1)
        if oldest:
            name = living.production._rollouts.name_of(oldest[0].number)
            living.scripted.ending[name].set_result(kept)
            await living.production.verify()

    async def train(self) -> bool:
        """Make a step if there are groups for it."""
        consumption = BatchReader(self.config, self.store, RatingOverrides([]), first_version=0, seed=0)
        supply = RemoteBatches(self.config, self.store, consumption, Trace(), self.folder, self.heart)
        if self.version == self.config.steps or (
            self.store.waiting(min_version=self.version - self.config.max_staleness) < self.config.rollout.batch
        ):
            return False
        taken = await supply.collect(self.version)
        assert all(self.version - each.oldest_version <= self.config.max_staleness for each in taken)
        names = [each.group for each in taken]
        assert len(names) == self.config.rollout.batch
        if self.version in self.learned:
            assert self.learned[self.version] == names  # a step that is made again learns from the same groups
        self.learned[self.version] = names
        self.version += 1
        return True

    def resume(self) -> None:
        """The trainer dies, and goes on from its checkpoint."""
        before = {each.id for _, each in self.store.read(group("any").kind)}
        self.version = self.checkpoint
        self.store.rewind(self.mark, step=self.version)
        self.notice.write(self.folder)
        assert {each.id for _, each in self.store.read(group("any").kind)} == before

    async def close(self) -> None:
        for living in list(self.explorers.values()):
            await self.die(living)
        self.heart.close("done")
        self.store.close()


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["start", "finish", "finish", "drop", "follow", "train", "die", "join", "save", "resume"]),
        st.integers(0, 2),
    ),
    min_size=20,
    max_size=60,
)


@settings(max_examples=15)
@given(batch=st.integers(1, 3), staleness=st.integers(0, 3), events=EVENTS)
def test_groups_are_fresh_enough_used_once_and_never_lost(
    batch: int, staleness: int, events: list[tuple[str, int]]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(happens(World(Path(folder), batch=batch, staleness=staleness, steps=6), events))


async def happens(world: World, events: list[tuple[str, int]]) -> None:
    world.join()
    try:
        for event, number in events:
            living = world.explorers.get(number)
            match event, living:
                case "train", _:
                    await world.train()
                case "save", _:
                    world.checkpoint, world.mark = world.version, world.store.mark()
                case "resume", _:
                    world.resume()
                case "join", None if len(world.explorers) < 3:
                    world.join()
                case "start", Living():
                    await world.start(living)
                case (("finish" | "drop"), Living()):
                    await world.finish(living, event == "finish")
                case "follow", Living():
                    living.scripted.version = world.version
                case "die", Living():
                    await world.die(living)
        await goes_on(world)
    finally:
        await world.close()


async def goes_on(world: World) -> None:
    """Whatever has happened, explorers that come back and keep at it bring the stage to its end."""
    while len(world.explorers) < 2:
        world.join()
    for _ in range(200):
        if world.version == world.config.steps:
            break
        for living in world.explorers.values():
            living.scripted.version = world.version
            await world.start(living)
            await world.finish(living, True)
        await world.train()
    assert world.version == world.config.steps
    names = [name for step in world.learned.values() for name in step]
    assert len(names) == len(set(names))
    waiting = world.store.ahead(world.version, min_version=world.version)
    assert waiting == world.store.waiting(min_version=world.version)


def test_explorers_that_keep_up_make_no_group_in_vain(tmp_path: Path) -> None:
    """With weights at once everywhere, three explorers together start what the steps need, and no group more."""

    async def made() -> tuple[int, int]:
        world = World(tmp_path, batch=4, staleness=1, steps=5)
        for _ in range(3):
            world.join()
        await goes_on(world)
        count = sum(1 for _ in world.store.read(group("any").kind))
        await world.close()
        return count, world.store.expired()

    assert asyncio.run(made()) == (20, 0)


def test_a_place_is_free_again_when_its_process_is_gone(tmp_path: Path) -> None:
    first, second = ExitStack(), ExitStack()
    zero = first.enter_context(acquire_worker_slot(tmp_path))
    one = second.enter_context(acquire_worker_slot(tmp_path))
    assert (zero.number, one.number) == (0, 1)
    zero.save(0, WorkerState([(3, "t1"), (4, "t2")], 5))
    assert (zero.others(0), one.others(0)) == (0, 2)
    alive = HeartbeatWriter(tmp_path, "explorer 0")
    assert one.others(0) == 2
    alive.close("done")
    beat = tmp_path / "processes/explorer-0.json"
    beat.write_text(json.dumps(json.loads(beat.read_text()) | {"beat": time.time() - 2 * SILENT_S}))
    assert one.others(0) == 0  # it hangs, though it has its lock
    first.close()
    beat.unlink()
    assert one.others(0) == 0
    with acquire_worker_slot(tmp_path) as again:
        assert again.number == 0
        assert again.load(0) == WorkerState([(3, "t1"), (4, "t2")], 5)
    second.close()
    assert (tmp_path / EXPLORERS / "0.lock").exists()


def test_a_run_that_begins_anew_forgets_what_was_there(tmp_path: Path) -> None:
    with acquire_worker_slot(tmp_path) as own:
        own.save(0, WorkerState([(0, "t1")], 1))
        own.note({"version": 0})
        TrainerStatus("id", 0, 0).write(tmp_path)
        remove_run_state(tmp_path)
        assert own.load(0) is None
    left = [path.name for path in (tmp_path / EXPLORERS).iterdir()]
    assert sorted(left) == ["0.lock", "lock"]
    assert not (tmp_path / TRAINER_STATUS).exists()


def test_what_explorers_have_put_for_an_earlier_stage_is_not_handed_out(tmp_path: Path) -> None:
    store = SqlStore(Database(sqlite_url(tmp_path / DATABASE_FILE)), "id")
    writers = {"a": REMOTE_EXPLORER + "first", "b": REMOTE_EXPLORER + "second", "c": EXPLORER, "d": "imported"}
    store.put([group(name, version=5, writer=writer) for name, writer in writers.items()])
    store.expire_remote(REMOTE_EXPLORER + "second", step=5)
    assert store.waiting() == 3
    assert [each.id for each in store.take(3, step=6, deadline_s=0)] == ["b", "c", "d"]
    store.rewind(store.mark(), step=5)
    assert store.waiting() == 3
    store.rewind(store.mark(), step=4)
    assert store.waiting() == 4
    store.close()


def test_a_wait_for_explorers_names_them(tmp_path: Path) -> None:
    assert "No explorer has joined; start one: rollmill run" in describe_explorers(tmp_path)
    HeartbeatWriter(tmp_path, "explorer 0").close("reward `mine` raised")
    alive = HeartbeatWriter(tmp_path, "explorer 1")
    alive.set_activity("wait", "the trainer's next version")
    text = describe_explorers(tmp_path)
    alive.close("done")
    assert "explorer 0 (process " in text
    assert "has ended: reward `mine` raised; explorer 1 (process" in text
    assert "s ago: wait, waits for the trainer's next version" in text
    with pytest.raises(DeadlineError, match=r"3 of the 3 groups of step 1, .*explorer 0"):
        asyncio.run(_waits(tmp_path))


async def _waits(folder: Path) -> None:
    world = World(folder, batch=3, staleness=0, steps=2)
    consumption = BatchReader(world.config, world.store, RatingOverrides([]), first_version=0, seed=0)
    try:
        await RemoteBatches(world.config, world.store, consumption, Trace(), folder, world.heart).collect(0)
    finally:
        await world.close()


def test_an_explorer_that_comes_back_makes_what_was_missing_and_nothing_twice(tmp_path: Path) -> None:
    async def made() -> None:
        world = World(tmp_path, batch=4, staleness=0, steps=3)
        world.join()
        await world.start(world.explorers[0])
        await world.finish(world.explorers[0], True)
        names = world.explorers[0].production._rollouts.unfinished()
        assert [number for number, _ in names] == [1, 2, 3]
        said = world.explorers[0].place.load(0)
        await world.finish(world.explorers[0], True)
        await world.die(world.explorers[0])
        assert said is not None
        (tmp_path / EXPLORERS / "stage-0/0.json").write_text(json.dumps(asdict(said)))  # killed before it said so
        world.join()
        again = world.explorers[0]
        assert again.production._rollouts.unfinished() == names[1:]
        await world.start(again)
        assert [group.number for group in again.production._queue.all()] == [2, 3]
        for _ in range(2):
            await world.finish(again, True)
        await goes_on(world)
        made = [name for step in world.learned.values() for name in step]
        assert sorted(made)[:4] == [f"x.0-00000{n}" for n in range(4)]
        await world.close()

    asyncio.run(made())


def test_a_trainer_that_goes_back_learns_from_the_same_groups_again(tmp_path: Path) -> None:
    async def made() -> None:
        world = World(tmp_path, batch=2, staleness=1, steps=3)
        world.join()
        await world.start(world.explorers[0])
        for _ in range(4):
            await world.finish(world.explorers[0], True)
        assert await world.train()
        assert await world.train()
        assert not await world.train()
        world.resume()
        assert world.store.waiting() == 4
        assert await world.train()
        assert world.learned == {0: ["x.0-000000", "x.0-000001"], 1: ["x.0-000002", "x.0-000003"]}
        await world.close()

    asyncio.run(made())
