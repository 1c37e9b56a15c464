"""Memory, SQLite and PostgreSQL do the same, whatever is asked of them in whatever order."""

from __future__ import annotations

import shutil
import tempfile
import uuid
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from support.buffer_groups import group, ids, same_groups
from support.postgres import Postgres

from rollmill.buffer.base import EXPLORER, FEEDBACK, IMPORTED, PIPELINE, ExperienceKind, ExperienceStore, Group
from rollmill.buffer.database import Database, sqlite_url
from rollmill.buffer.memory import MemoryStore
from rollmill.buffer.sql import SqlStore
from rollmill.config.buffer import ReplayConfig
from rollmill.errors import DeadlineError

RULES = st.builds(
    ReplayConfig,
    groups=st.integers(1, 4),
    order=st.sampled_from(["fifo", "uniform", "priority"]),
    priority=st.sampled_from(["given", "advantage"]),
    exponent=st.sampled_from([0.0, 1.0, 2.0]),
    decay=st.sampled_from([0.5, 1.0]),
    max_age=st.none() | st.integers(0, 5),
    max_uses=st.none() | st.integers(2, 4),
    cooldown=st.integers(1, 3),
    capacity=st.integers(1, 8),
)
KINDS = [
    (EXPLORER, ExperienceKind.ROLLOUT),
    (PIPELINE, ExperienceKind.ROLLOUT),
    (IMPORTED, ExperienceKind.ROLLOUT),
    (EXPLORER, ExperienceKind.PARTIAL),
    (FEEDBACK, ExperienceKind.EXPERT),
    (PIPELINE, ExperienceKind.EXPERT),
]


class Machine(RuleBasedStateMachine):
    """Drives all stores as a run does: put, take, replay, learn, checkpoint, be killed, go on."""

    server: Postgres | None = None

    @initialize()
    def open(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.run_id = uuid.uuid4().hex
        self.memory: ExperienceStore = MemoryStore(keep=1000)
        self.databases = [self._sql(place) for place in self._places()]
        self.step, self.taken, self.made = 0, False, 0
        self.checkpoint: tuple[int, list[Any]] | None = None
        self.fed = False  # since the checkpoint: what a fresh store in memory cannot know
        self.kinds: dict[str, ExperienceKind] = {}
        self.handed: dict[int, list[Group]] = {}

    def _places(self) -> list[Any]:
        return [sqlite_url(self.folder / "b.sqlite"), *([self.server.url] if self.server else [])]

    def _sql(self, place: Any) -> SqlStore:
        return SqlStore(Database(place), self.run_id)

    @property
    def stores(self) -> list[ExperienceStore]:
        return [self.memory, *self.databases]

    def agree(self, answers: list[Any]) -> Any:
        assert all(answer == answers[0] for answer in answers[1:]), answers
        return answers[0]

    def groups(self, answers: list[list[Group]]) -> list[Group]:
        assert all(same_groups(answer, answers[0]) for answer in answers[1:]), [ids(answer) for answer in answers]
        return answers[0]

    @rule(
        kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=5),
        ages=st.lists(st.integers(0, 3), min_size=5, max_size=5),
        priority=st.sampled_from([0.0, 0.5, 1.0, 3.0]),
        again=st.booleans(),
    )
    def put(self, kinds: list[tuple[str, ExperienceKind]], ages: list[int], priority: float, again: bool) -> None:
        made = []
        for (writer, kind), age in zip(kinds, ages, strict=False):
            self.made += 1
            version = max(0, self.step - age)
            made.append(group(f"g{self.made}", version=version, kind=kind, writer=writer, priority=priority))
            self.kinds[f"g{self.made}"] = kind
            self.fed |= writer in (FEEDBACK, IMPORTED)
        if again:
            known = f"g{max(1, self.made - 5)}"
            made.append(group(known, kind=self.kinds[known]))
        self.agree([store.put(made) for store in self.stores])

    @precondition(lambda self: not self.taken)
    @rule(count=st.integers(1, 3), lag=st.none() | st.integers(0, 2))
    def take(self, count: int, lag: int | None) -> None:
        oldest = None if lag is None else max(0, self.step - lag)
        answers: list[Any] = []
        for store in self.stores:
            try:
                answers.append(store.take(count, step=self.step + 1, deadline_s=0, min_version=oldest))
            except DeadlineError:
                answers.append([])
        found = self.groups(answers)
        self.taken = bool(found)
        seen = [each.id for groups in self.handed.values() for each in groups]
        assert not set(ids(found)) & set(seen), "handed out twice in one lineage"
        if found:
            self.handed[self.step + 1] = found

    @precondition(lambda self: self.taken)
    @rule(count=st.integers(1, 3))
    def take_again(self, count: int) -> None:
        found = self.groups([store.take(count, step=self.step + 1, deadline_s=0) for store in self.stores])
        assert same_groups(found, self.handed[self.step + 1])

    @precondition(lambda self: self.taken)
    @rule(replay=RULES, seed=st.integers(0, 3), advantage=st.sampled_from([0.0, 0.25, 4.0]))
    def learn(self, replay: ReplayConfig, seed: int, advantage: float) -> None:
        step = self.step + 1
        answers = [store.replay(replay, step=step, version=self.step, seed=seed) for store in self.stores]
        found = self.groups(answers)
        assert not set(ids(found)) & set(ids(self.handed[step]))
        batch = self.handed[step] + found
        for place, each in enumerate(batch):
            each.priority = advantage * (place + 1)
        for store in self.stores:
            store.update_priorities(batch, step=step)
        self.step, self.taken = step, False

    @rule(count=st.integers(1, 3))
    def take_partial(self, count: int) -> None:
        self.groups([store.take_partial(count, step=self.step + 1) for store in self.stores])

    @rule()
    def write_checkpoint(self) -> None:
        self.checkpoint = (self.step, [store.mark() for store in self.stores])
        self.fed = False

    @rule(data=st.data())
    def remove_and_restore(self, data: st.DataObject) -> None:
        waiting = [each.id for _, each in self.memory.read(ExperienceKind.EXPERT)]
        if waiting:
            chosen = [data.draw(st.sampled_from(waiting))]
            for store in self.stores:
                store.remove(chosen, by="Ann")
                assert store.get(chosen) == []
            self.fed = True
            self.look()
            for store in self.stores:
                store.restore(chosen)

    @rule()
    def resume(self) -> None:
        """The run is killed and goes on from its checkpoint."""
        step, marks = self.checkpoint or (0, [None] * len(self.stores))
        if not self.fed:
            self.memory = MemoryStore(keep=1000)
        for database in self.databases:
            database.close()
        self.databases = [self._sql(place) for place in self._places()]
        for store, mark in zip(self.stores, marks, strict=True):
            store.rewind(mark, step=step)
        self.step, self.taken = step, False
        self.handed = {at: groups for at, groups in self.handed.items() if at <= step}

    @rule()
    def look(self) -> None:
        self.agree([(store.waiting(), store.expired()) for store in self.stores])
        self.groups([[each for _, each in store.read(ExperienceKind.EXPERT)] for store in self.stores])

    def teardown(self) -> None:
        for database in getattr(self, "databases", []):
            database.close()
        shutil.rmtree(getattr(self, "folder", "/nonexistent"), ignore_errors=True)


@pytest.mark.thorough
@pytest.mark.slow
def test_memory_and_sqlite_do_the_same() -> None:
    run_state_machine_as_test(Machine, settings=settings(max_examples=25, stateful_step_count=30, deadline=None))


@pytest.mark.service
def test_all_three_do_the_same(pg: Postgres) -> None:
    machine = type("WithServer", (Machine,), {"server": pg})
    run_state_machine_as_test(machine, settings=settings(max_examples=20, stateful_step_count=30, deadline=None))
