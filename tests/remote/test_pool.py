"""A pool whose members come, go, hang and come back: every call is answered once, by one that lives."""

from __future__ import annotations

import asyncio
import itertools
import json
import pickle
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.pool_workers import Held, Worker, joined, until

from rollmill.config.placement import ExplorerSpec
from rollmill.errors import ConfigError, RewardError
from rollmill.files import atomic_write
from rollmill.remote import joined_explorers, worker_pool
from rollmill.remote.connection import LOST, join_trainer
from rollmill.remote.explorer_worker import ExplorerWorker
from rollmill.remote.joined_explorers import JoinedExplorers
from rollmill.remote.run_state import (
    TrainerStatus,
    acquire_worker_number,
    describe_explorers,
    read_trainer_status,
)
from rollmill.remote.stage_worker import RolloutReply
from rollmill.remote.worker_pool import WorkerLostError, WorkerPool
from rollmill.trackers.heartbeat import HeartbeatWriter
from rollmill.waiting import OUTAGES, Outage

EVENT = st.tuples(st.sampled_from(["call", "answer", "answer", "join", "admit", "die", "retire"]), st.integers(0, 2))


@settings(max_examples=30)
@given(events=st.lists(EVENT, max_size=40))
def test_every_call_is_answered_once_whoever_dies(events: list[tuple[str, int]]) -> None:
    asyncio.run(_happens(events))


async def _happens(events: list[tuple[str, int]]) -> None:
    pool, members = WorkerPool("explorer", {}, health_s=60), dict[str, Held]()
    calls: dict[str, asyncio.Task[Any]] = {}
    leaving, leaves = list[Held](), list[asyncio.Task[None]]()
    await pool.begin("stage")
    for event, number in [*events, ("join", 0), *[("answer", 0)] * (len(events) + 1)]:
        name = f"explorer {number}"
        if event == "call":
            calls[str(len(calls))] = asyncio.ensure_future(pool.call("rollout", str(len(calls))))
        elif event == "join":
            members[name] = Held()
            pool.add(name, members[name])
        elif event == "admit" and name not in members:
            members[name] = Held()
            await pool.admit(name, members[name])
        elif event == "retire" and name in members:
            leaving.append(members.pop(name))
            leaves.append(
                asyncio.ensure_future(pool.retire(name, number * 3600.0))
            )  # 0: its calls go to others at once
        elif event == "die" and name in members:
            members.pop(name).kill()
        elif event == "answer":
            for member in [*members.values(), *leaving]:
                for one, future in list(member.running.items())[:1]:
                    future.set_result(f"result {one}")
        for _ in range(30):
            await asyncio.sleep(0)
    assert [(await task)[1] for task in calls.values()] == [f"result {name}" for name in calls]
    await asyncio.gather(*leaves)
    assert all(member.begun == "stage" for member in members.values())
    assert {each.name for each in pool.workers if not each.handle.ended} == set(members)  # type: ignore[attr-defined]
    await pool.end()


class Stage:
    """A stage in an explorer's process: a rollout ends once it has been asked for in two lives of the stage."""

    tokens_generated, asked = 0, list[str]()

    def __init__(self, setup: Any, kind: ExplorerSpec) -> None: ...

    async def rollout(self, request: Any) -> Any:
        self.asked.append(request.group)
        while self.asked.count(request.group) < 2:
            await asyncio.sleep(0.001)
        return RolloutReply([], [], 0, counts={request.group: 1})

    async def close(self) -> None: ...


class Silent:
    """A heartbeat that writes nothing."""

    def set_activity(self, *doing: str, version: int | None = None) -> None: ...


class Unreliable:
    """Calls an explorer's process as Ray does; loses the connection to it for one call. A WorkerHandle."""

    restartable = True

    def __init__(self) -> None:
        beat: Any = Silent()
        stage: Any = Stage
        self.worker = ExplorerWorker(beat, ExplorerSpec(), build_stage=stage)
        self.loses = asyncio.Event()

    async def call(self, method: str, *arguments: Any) -> Any:
        reply = asyncio.ensure_future(getattr(self.worker, method)(*arguments))
        if method == "rollout" and not self.loses.is_set() and arguments[1].group == "lost":
            await self.loses.wait()
            raise WorkerLostError("it is not available")
        return await reply

    def notify(self, method: str, *arguments: Any) -> None: ...

    def kill(self) -> None: ...


def test_what_an_explorer_drops_because_it_begins_again_is_done_again() -> None:
    """The explorer lives on, and loses the answer to one of two rollouts only."""

    async def happens() -> None:
        handle = Unreliable()
        pool = WorkerPool("explorer", {"explorer 0": handle}, health_s=60, replacements=1)
        await pool.begin("stage", SimpleNamespace(starts_offloaded=False))
        calls = [
            asyncio.ensure_future(pool.call("rollout", "stage", SimpleNamespace(group=group, version=0)))
            for group in ("lost", "dropped")
        ]
        await asyncio.sleep(0.01)
        handle.loses.set()
        async with asyncio.timeout(30):
            assert [(await call)[1].counts for call in calls] == [{"lost": 1}, {"dropped": 1}]
        assert pool.replaced == 1
        await pool.end("stage")

    asyncio.run(happens())


def test_calls_over_a_connection(tmp_path: Path) -> None:
    async def work() -> None:
        explorers, worker = JoinedExplorers(tmp_path, "id"), Worker()
        async with explorers.serving(), joined(tmp_path, 3, worker):
            await until(lambda: bool(explorers.pool.workers))
            await explorers.pool.begin("stage")
            (name, _), reply = await explorers.pool.call("rollout", "stage", "x" * 1_000_000)
            assert (name, len(reply)) == ("explorer 3", 1_000_000)
            with pytest.raises(RewardError, match="no good"):
                await explorers.pool.call("rollout", "stage", "fails")
            for what in ("cannot be sent", lambda: None):  # neither a reply nor a call that cannot be pickled hangs
                with pytest.raises((AttributeError, pickle.PicklingError, RuntimeError), match="lambda"):
                    await asyncio.wait_for(explorers.pool.call("rollout", "stage", what), 60)
            call = asyncio.ensure_future(explorers.pool.call("rollout", "stage", "never ends"))
            await worker.started.wait()
            call.cancel()
            await asyncio.wait_for(worker.stopped.wait(), 60)
            await explorers.pool.end("stage")
            assert worker.uses == []

    asyncio.run(work())


def test_a_group_of_a_lost_explorer_is_asked_of_the_next_one(tmp_path: Path) -> None:
    async def work() -> None:
        explorers, first, second = JoinedExplorers(tmp_path, "id"), Worker(), Worker()
        async with explorers.serving():
            await explorers.pool.begin("stage")
            call = asyncio.ensure_future(explorers.pool.call("rollout", "stage", "never ends"))
            async with joined(tmp_path, 0, first):
                await first.started.wait()
            await asyncio.wait_for(first.stopped.wait(), 60)
            async with joined(tmp_path, 0, second):  # the number is free again
                await second.started.wait()
                assert second.uses == ["stage"]
                call.cancel()
        assert explorers.pool.replaced == 1

    asyncio.run(work())


def test_an_explorer_that_hangs_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its groups go to another one, and its connection ends, so that it drops them when it goes on."""
    monkeypatch.setattr(joined_explorers, "HEALTH_S", 0.5)

    async def work() -> None:
        explorers, other, hangs = JoinedExplorers(tmp_path, "id"), Worker(), Worker()
        silent = asyncio.Event()

        async def never() -> int:
            silent.set()
            await asyncio.sleep(1000)
            return 0

        async with explorers.serving(), joined(tmp_path, 0, hangs) as serving:
            await until(lambda: bool(explorers.pool.workers))
            await explorers.pool.begin("stage")
            hangs.ready = never  # type: ignore[method-assign]
            call = asyncio.ensure_future(explorers.pool.call("rollout", "stage", "never ends"))
            await hangs.started.wait()
            async with joined(tmp_path, 1, other):
                await other.started.wait()
                await asyncio.wait_for(serving, 60)
                assert silent.is_set()
                assert hangs.stopped.is_set()
                assert [each.name for each in explorers.pool.workers] == ["explorer 1"]
                call.cancel()

    asyncio.run(work())


@pytest.mark.parametrize("beats", [False, True])
def test_an_explorer_that_neither_answers_nor_beats_is_lost_sooner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, beats: bool
) -> None:
    monkeypatch.setattr(worker_pool, "_LAST_CHANCE_S", 0.1)

    async def beat(path: Path) -> None:
        for number in itertools.count():
            await asyncio.to_thread(atomic_write, path, json.dumps({"beat": float(number)}).encode())
            await asyncio.sleep(0.01 if beats else 1000.0)

    async def work() -> None:
        explorers, hangs = JoinedExplorers(tmp_path, "id", silent_s=0.5), Worker()
        asked = asyncio.Event()

        async def never() -> int:
            asked.set()
            await asyncio.sleep(1000)
            return 0

        (tmp_path / "processes").mkdir()
        beating = asyncio.ensure_future(beat(tmp_path / "processes/explorer-0.json"))
        async with explorers.serving(), joined(tmp_path, 0, hangs) as serving:
            await until(lambda: bool(explorers.pool.workers))
            await explorers.pool.begin("stage")
            hangs.ready = never  # type: ignore[method-assign]
            await asked.wait()
            done, _ = await asyncio.wait([serving], timeout=2.0 if beats else 60.0)
            assert bool(done) == (not beats)
            assert bool(explorers.pool.workers) == beats
        beating.cancel()

    asyncio.run(work())


def test_deadlines_stand_still_while_a_judge_is_away_for_an_explorer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joined_explorers, "HEALTH_S", 0.2)

    async def work() -> None:
        explorers, worker = JoinedExplorers(tmp_path, "id"), Worker(outages=[Outage("the judge", "503", 0.0)])
        async with explorers.serving(), joined(tmp_path, 0, worker):
            await until(lambda: bool(explorers.pool.workers))
            await explorers.pool.begin("stage")
            await until(lambda: bool(OUTAGES.current()))
            assert OUTAGES.describe().startswith("the judge, for explorer 0 (503; for ")
            worker.outages = []
            await until(lambda: not OUTAGES.current())
            worker.outages = [Outage("the judge", "503", 0.0)]
            await until(lambda: bool(OUTAGES.current()))
        await until(lambda: not OUTAGES.current())

    asyncio.run(work())


def test_one_that_cannot_begin_ends_with_its_error_and_others_go_on(tmp_path: Path) -> None:
    async def work() -> None:
        explorers, able = JoinedExplorers(tmp_path, "id"), Worker()
        async with explorers.serving(), joined(tmp_path, 0, Worker()) as serving:
            await until(lambda: bool(explorers.pool.workers))
            await explorers.pool.begin("impossible")
            assert explorers.pool.workers == []
            assert isinstance(await asyncio.wait_for(serving, 60), ConfigError)
            await explorers.pool.end("impossible")
            async with joined(tmp_path, 1, able):
                await until(lambda: bool(explorers.pool.workers))
                await explorers.pool.begin("stage")
                assert (await explorers.pool.call("rollout", "stage", "x"))[1] == "x"

    asyncio.run(work())


def test_without_the_key_nobody_joins(tmp_path: Path) -> None:
    async def work() -> None:
        explorers = JoinedExplorers(tmp_path, "id")
        async with explorers.serving():
            trainer = read_trainer_status(tmp_path)
            assert trainer is not None
            assert stat.S_IMODE((tmp_path / "trainer.json").stat().st_mode) == 0o600
            reader, writer = await asyncio.open_connection("localhost", trainer.port)
            with pytest.raises(LOST):
                await join_trainer(reader, writer, bytes(32), 0)
            writer.close()
            assert explorers.pool.workers == []
        done = read_trainer_status(tmp_path)
        assert done is not None
        assert (done.run_id, done.done, done.key) == ("id", True, "")

    asyncio.run(work())


def test_a_worker_trusts_only_its_trainer() -> None:
    """A program that has taken over the trainer's port cannot make a worker unpickle anything."""

    async def work() -> None:
        async def pretend(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(bytes(32))
            await reader.readexactly(64)
            writer.write(bytes(32))

        server = await asyncio.start_server(pretend, "localhost", 0)
        async with server:
            reader, writer = await asyncio.open_connection("localhost", server.sockets[0].getsockname()[1])
            with pytest.raises(ConnectionRefusedError, match="in use by another program"):
                await join_trainer(reader, writer, b"key", 0)
            writer.close()

    asyncio.run(work())


def test_a_number_is_free_again_when_its_process_is_gone(tmp_path: Path) -> None:
    with acquire_worker_number(tmp_path) as zero:
        with acquire_worker_number(tmp_path) as one:
            assert (zero, one) == (0, 1)
        with acquire_worker_number(tmp_path) as again:
            assert again == 1


@pytest.mark.parametrize("more", [{"addresses": [], "later": 1}, {}])
def test_the_status_of_another_version_is_refused(tmp_path: Path, more: dict[str, object]) -> None:
    (tmp_path / "trainer.json").write_text(json.dumps({"run_id": "id", "done": False} | more))
    with pytest.raises(ConfigError, match=r"trainer\.json was written by another version of rollmill; use the same"):
        read_trainer_status(tmp_path)


def test_the_status_is_read_as_written(tmp_path: Path) -> None:
    status = TrainerStatus("id", "here", ("192.0.2.7",), 5, "00")
    status.write(tmp_path)
    assert read_trainer_status(tmp_path) == status


def test_explorers_are_described_for_an_error(tmp_path: Path) -> None:
    assert "No explorer has joined; start one: rollmill run" in describe_explorers(tmp_path)
    HeartbeatWriter(tmp_path, "explorer 0").close("reward `mine` raised")
    alive = HeartbeatWriter(tmp_path, "explorer 1")
    alive.set_activity("nothing", "the trainer")
    text = describe_explorers(tmp_path)
    alive.close("done")
    assert "explorer 0 (process " in text
    assert "has ended: reward `mine` raised; explorer 1 (process" in text
    assert "s ago: nothing, waits for the trainer" in text
