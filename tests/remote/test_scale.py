"""`rollmill scale` changes the number of explorers of a run that goes on: nothing is lost or done twice."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.forks import Forks, ended, forks, send
from support.pool_workers import Held, Worker, joined, until
from support.tiny import metrics, tiny_run, trainer
from support.vllm_service import PYTHON, needs_vllm

from rollmill.cli import main
from rollmill.config.loader import load_run
from rollmill.errors import ConfigError, CorruptFileError
from rollmill.remote import scaling
from rollmill.remote.joined_explorers import JoinedExplorers
from rollmill.remote.scaling import SCALE_ANSWER, SCALE_REQUEST, pending_request, read_answer
from rollmill.remote.worker_pool import WorkerPool
from rollmill.supervision.run_lock import hold_run_lock
from rollmill.trackers.event_log import SCALE, read_events
from rollmill.trackers.heartbeat import CONFIG, HeartbeatRecord, read_heartbeats

RL: dict[str, Any] = {"stages": None, "algorithm": {"name": "grpo"}, "evaluation": None}
PATIENT = """
import asyncio

import rollmill


@rollmill.workflow
async def patient(task, policy, judge):
    await asyncio.sleep(0.2)
    return await judge(await policy.complete(task.prompt))
"""
LONG = RL | {"steps": 100_000, "max_staleness": 1, "checkpoint": {"every": 100_000}, "workflow": "patient"}
"""A run that ends when it is interrupted, and leaves the cores to processes that start."""
BATCH, GROUP = 4, 4


def long_run(folder: Path, **changes: Any) -> Path:
    """Write the run file of a long run; returns its run directory."""
    (folder / "patient.py").write_text(PATIENT)
    tiny_run(folder, **LONG, plugins=[str(folder / "patient.py")], **changes)
    return folder / "out"


def test_a_worker_that_leaves_finishes_its_calls_and_gets_no_others() -> None:
    async def work() -> None:
        first, second = Held(), Held()
        pool = WorkerPool("explorer", {"explorer 0": first, "explorer 1": second}, health_s=60)
        await pool.begin("stage")
        calls = [asyncio.ensure_future(pool.call("rollout", str(n))) for n in range(2)]
        await until(lambda: len(first.running) == len(second.running) == 1)
        leaves = asyncio.ensure_future(pool.retire("explorer 1", 3600.0))
        await asyncio.sleep(0)
        calls += [asyncio.ensure_future(pool.call("rollout", str(n))) for n in range(2, 5)]
        await until(lambda: len(first.running) == 4)
        assert list(second.running) == ["1"]
        assert not leaves.done()
        for future in [*first.running.values(), *second.running.values()]:
            future.set_result("done")
        assert [(await call)[0][0][-1] for call in calls] == ["0", "1", "0", "0", "0"]
        await leaves
        assert [each.name for each in pool.workers] == ["explorer 0"]
        assert pool.replaced == 0
        await pool.end()

    asyncio.run(work())


def test_a_worker_that_cannot_begin_is_not_added_and_leaves_the_others_alone() -> None:
    class Unable(Held):
        restartable = True

        async def call(self, method: str, *arguments: Any) -> Any:
            if method == "begin":
                raise ConfigError("too little memory")

    async def work() -> None:
        able = Held()
        pool = WorkerPool("explorer", {"explorer 0": able}, health_s=60)
        await pool.begin("stage")
        with pytest.raises(ConfigError, match="too little memory"):
            await pool.admit("explorer 1", Unable())
        call = asyncio.ensure_future(pool.call("rollout", "one"))
        await until(lambda: bool(able.running))
        able.running["one"].set_result("done")
        assert (await call)[1] == "done"
        assert [each.name for each in pool.workers] == ["explorer 0"]
        await pool.end()

    asyncio.run(work())


@dataclass
class Dismissible(Worker):
    """A worker that notes why it is not needed any more."""

    dismissed: str = ""

    async def dismiss(self, why: str) -> None:
        self.dismissed = why


def written(folder: Path, **changes: Any) -> Path:
    """A run directory with nothing but the run file."""
    loaded = load_run(tiny_run(folder, **RL | changes))
    (folder / "out").mkdir()
    (folder / "out" / CONFIG).write_text(loaded.to_yaml())
    return folder / "out"


@pytest.fixture
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "LOOK_S", 0.01)


async def scale(run: Path, explorers: int, *more: str) -> int:
    return await asyncio.to_thread(main, ["scale", str(run), "--explorers", str(explorers), *more])


@pytest.mark.usefixtures("looks_often")
def test_joined_explorers_above_the_number_leave(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, messages = written(tmp_path, mode="train"), list[str]()

    async def work() -> None:
        workers = [Dismissible() for _ in range(4)]
        explorers = JoinedExplorers(run, "id")
        async with explorers.serving(messages.append), AsyncExitStack() as stack:
            for number in range(3):
                await stack.enter_async_context(joined(run, number, workers[number]))
            await until(lambda: len(explorers.pool.workers) == 3)
            await explorers.pool.begin("stage")
            assert await scale(run, 1, "--json") == 0
            answer = json.loads(capsys.readouterr().out)
            assert (answer["before"], answer["explorers"], answer["missing"]) == (3, 1, 0)
            assert [bool(each.dismissed) for each in workers] == [False, True, True, False]
            assert "the run was scaled to 1 explorer (rollmill scale)" in workers[2].dismissed
            late = await stack.enter_async_context(joined(run, 3, workers[3]))
            await asyncio.wait_for(late, 60)
            assert workers[3].dismissed, "the number holds for those that come later, too"
            assert await scale(run, 3) == 1
            said = capsys.readouterr().err
            assert "scaled from 1 to 3 explorers; 2 more have to be started; explorers join by: rollmill run" in said
            async with joined(run, 4, Dismissible()):
                await until(lambda: len(explorers.pool.workers) == 2)

    with hold_run_lock(run):
        asyncio.run(work())
    assert [(row["before"], row["explorers"]) for row in read_events(run, SCALE)] == [(3, 1), (1, 3)]
    assert messages == [row["text"] for row in read_events(run, SCALE)]
    assert main(["status", str(run)]) == 0
    assert f"explorers: {messages[-1]} (" in capsys.readouterr().out
    answer = read_answer(run)
    assert answer is not None
    assert answer.explorers == 3


@pytest.mark.usefixtures("looks_often")
def test_a_resumed_trainer_keeps_the_number(tmp_path: Path) -> None:
    run = written(tmp_path, mode="train")

    async def work() -> None:
        async with JoinedExplorers(run, "id").serving():
            assert await scale(run, 1) == 1
        explorers, second = JoinedExplorers(run, "id"), Dismissible()
        async with explorers.serving(), joined(run, 0, Dismissible()):
            await until(lambda: len(explorers.pool.workers) == 1)
            async with joined(run, 1, second) as serving:
                await asyncio.wait_for(serving, 60)
        assert second.dismissed

    with hold_run_lock(run):
        asyncio.run(work())


def test_who_has_no_number_of_explorers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["scale", str(written(tmp_path)), "--explorers", "2"]) == 2
    said = capsys.readouterr().err
    assert "rolls out in the process that trains, so it has no number of explorers" in said
    assert "`placement: ray` or `mode: train`" in said
    assert main(["scale", str(tmp_path / "out"), "--explorers", "0"]) == 2
    assert main(["scale", str(tmp_path), "--explorers", "1"]) == 2
    assert "holds no run" in capsys.readouterr().err


def test_a_run_that_does_not_go_on_or_does_not_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = written(tmp_path, mode="train")
    assert main(["scale", str(run), "--explorers", "2"]) == 2
    assert "does not go on" in capsys.readouterr().err
    with hold_run_lock(run):
        assert main(["scale", str(run), "--explorers", "2", "--wait", "0"]) == 1
    assert "has not answered within 0 s (--wait)" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text", ["{}", "[]", "{", '{"id": "a", "explorers": 0}', '{"id": "a", "explorers": 1, "x": 2}']
)
def test_a_damaged_file_is_named(tmp_path: Path, text: str) -> None:
    for name, read in ((SCALE_ANSWER, read_answer), (SCALE_REQUEST, pending_request)):
        (tmp_path / name).write_text(text)
        with pytest.raises(CorruptFileError, match=f"{name} is damaged"):
            read(tmp_path)
        (tmp_path / name).unlink()


def beats(run: Path) -> dict[str, HeartbeatRecord]:
    return {each.name: each for each in read_heartbeats(run)}


def steps_after(run: Path, server: Forks, more: int) -> None:
    """Wait until the run has made some more steps."""
    count = len(metrics(run)) + more
    require_reached(server, lambda: len(metrics(run)) >= count)


def require_reached(server: Forks, happened: Callable[[], bool]) -> None:
    """Wait until something has happened in a run that goes on; looks rarely, as the run needs the cores."""

    def looked() -> bool:
        time.sleep(0.2)
        return happened()

    assert server.reaches(looked), server.output()


def require_each_group_once(run: Path) -> None:
    """Every step has its groups, whole and in the order in which they were begun."""
    assert [row["step"] for row in metrics(run)] == list(range(1, len(metrics(run)) + 1))
    files = sorted((run / "rollouts").glob("*.jsonl"))
    assert len(files) == len(metrics(run))
    rows = [[json.loads(line)["group"] for line in file.open()] for file in files]
    numbers = [[int(group.rpartition("-")[2]) for group in step] for step in rows]
    expected = [n for n in range(BATCH * len(files)) for _ in range(GROUP)]
    assert [n for step in numbers for n in sorted(step)] == [n + min(map(min, numbers)) for n in expected]


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_explorers_on_ray_come_and_go_while_the_run_trains(
    server: Forks, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("ray", reason="needs the extra `ray`")
    placement = {"name": "ray", "explorers": 1, "cpus": 0.5}
    run = long_run(tmp_path, placement=placement, monitor={"report": True})
    server.start("run", "run.yaml", "--out", "out", folder=tmp_path)
    require_reached(server, lambda: (run / "metrics.jsonl").is_file() and len(metrics(run)) >= 2)
    assert main(["scale", str(run), "--explorers", "9999"]) == 1
    assert "1 explorer as before, not 9999: they need 4999" in capsys.readouterr().err
    assert main(["scale", str(run), "--explorers", "3"]) == 0, server.output()
    assert "scaled from 1 to 3 explorers" in capsys.readouterr().out
    require_reached(server, lambda: min(beats(run)[f"explorer {n}"].version for n in range(3)) > 0)
    send(server.pid, signal.SIGINT)
    assert server.wait().code == 130
    assert "scaled from 1 to 3 explorers" in (run / "report.html").read_text()
    before = {name: each.pid for name, each in beats(run).items()}

    server.start("resume", "out", folder=tmp_path)
    names = [f"explorer {n}" for n in range(3)]
    require_reached(server, lambda: all(beats(run)[name].pid != before[name] for name in names))  # three again
    steps_after(run, server, 2)
    assert main(["scale", str(run), "--explorers", "1"]) == 0, server.output()
    assert [beats(run)[name].ended for name in names] == ["", *["left: rollmill scale"] * 2]
    steps_after(run, server, 5)
    send(server.pid, signal.SIGINT)
    done = server.wait()
    assert done.code == 130, done.err
    assert "scaled from 3 to 1 explorer" in done.out
    require_each_group_once(run)
    assert sum(row.get("explorer/replaced", 0) for row in metrics(run)) == 0
    assert [row["explorers"] for row in read_events(run, SCALE)] == [1, 3, 1]


@pytest.fixture
def servers(server: Forks) -> Iterator[list[Forks]]:
    with ExitStack() as stack:
        yield [server, *(stack.enter_context(forks()) for _ in range(2))]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_explorer_that_the_run_does_not_need_ends_well(servers: list[Forks], tmp_path: Path) -> None:
    run, modes = long_run(tmp_path), ("train", "explore", "explore")
    for server, mode in zip(servers, modes, strict=True):
        server.start("run", "run.yaml", "--set", f"mode={mode}", "--out", "out", folder=tmp_path)
    trainer, *explorers = servers
    names = ("explorer 0", "explorer 1")
    require_reached(trainer, lambda: all(name in beats(run) and beats(run)[name].version > 0 for name in names))
    assert main(["scale", str(run), "--explorers", "1"]) == 0
    require_reached(trainer, lambda: any(ended(each.pid) for each in explorers))
    left = next(each for each in explorers if ended(each.pid))
    done = left.wait()
    assert done.code == 0, done.err
    assert "explorer 1: the run was scaled to 1 explorer (rollmill scale), so this one leaves" in done.out
    steps_after(run, trainer, 3)
    send(trainer.pid, signal.SIGINT)
    assert trainer.wait().code == 130
    require_each_group_once(run)


VLLM: dict[str, Any] = {
    "engine": {"name": "vllm", "python": str(PYTHON), "cache_gb": 0.1},
    "model": {"new": {"hidden_size": 96, "heads": 3}},
}
LONG_TESTS = [pytest.mark.thorough, pytest.mark.service, needs_vllm]


def killed_run(folder: Path, **changes: Any) -> Path:
    """Write the run file of a long run whose trainer may be killed at any time."""
    (folder / "patient.py").write_text(PATIENT)
    kept = {"checkpoint": {"every": 1, "keep_last": 3}, "plugins": [str(folder / "patient.py")]}
    tiny_run(folder, **LONG | kept | changes)
    return folder / "out"


def with_version(run: Path, *names: str) -> bool:
    """True if these explorers have weights that were trained."""
    return all(name in beats(run) and not beats(run)[name].ended and beats(run)[name].version > 0 for name in names)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("engine", [pytest.param({}, id="native"), pytest.param(VLLM, id="vllm", marks=LONG_TESTS)])
def test_joined_explorers_are_scaled_while_the_trainer_is_killed(
    servers: list[Forks], tmp_path: Path, engine: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    run, (command, *explorers) = killed_run(tmp_path, trainer_away_s=120, **engine), servers
    for server, mode in zip(servers, ("train", "explore", "explore"), strict=True):
        server.start("run", "run.yaml", "--set", f"mode={mode}", "--out", "out", folder=tmp_path)
    require_reached(command, lambda: with_version(run, "explorer 0", "explorer 1"))
    assert send(trainer(run))
    assert main(["scale", str(run), "--explorers", "1"]) == 0, command.output()
    require_reached(command, lambda: any(ended(each.pid) for each in explorers))
    left = next(each for each in explorers if ended(each.pid))
    assert left.wait().code == 0
    steps_after(run, command, 2)

    assert send(trainer(run))
    steps_after(run, command, 2)  # the one that stays has joined again
    left.start("run", "run.yaml", "--set", "mode=explore", "--out", "out", folder=tmp_path)
    done = left.wait()
    assert done.code == 0, done.err
    assert "the run was scaled to 1 explorer (rollmill scale), so this one leaves" in done.out
    assert main(["scale", str(run), "--explorers", "2"]) == 1
    assert "1 more has to be started" in capsys.readouterr().err
    left.start("run", "run.yaml", "--set", "mode=explore", "--out", "out", folder=tmp_path)
    require_reached(command, lambda: with_version(run, "explorer 0", "explorer 1"))
    steps_after(run, command, 2)
    send(command.pid, signal.SIGINT)
    assert command.wait().code == 130
    require_each_group_once(run)


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.timeout(900)
@pytest.mark.parametrize("engine", [pytest.param({}, id="native"), pytest.param(VLLM, id="vllm", marks=LONG_TESTS)])
def test_explorers_on_ray_are_scaled_while_the_trainer_is_killed(
    server: Forks, tmp_path: Path, engine: dict[str, Any]
) -> None:
    pytest.importorskip("ray", reason="needs the extra `ray`")
    run = killed_run(tmp_path, placement={"name": "ray", "explorers": 1, "cpus": 0.5}, **engine)
    server.start("run", "run.yaml", "--out", "out", folder=tmp_path)
    require_reached(server, lambda: with_version(run, "explorer 0"))
    assert send(trainer(run))
    assert main(["scale", str(run), "--explorers", "2"]) == 0, server.output()
    require_reached(server, lambda: with_version(run, "explorer 0", "explorer 1"))
    assert send(trainer(run))
    assert main(["scale", str(run), "--explorers", "1"]) == 0, server.output()
    assert beats(run)["explorer 1"].ended == "left: rollmill scale"
    steps_after(run, server, 2)
    send(server.pid, signal.SIGINT)
    done = server.wait()
    assert done.code == 130, done.err
    require_each_group_once(run)
    assert [row["explorers"] for row in read_events(run, SCALE)] == [2, 1]
