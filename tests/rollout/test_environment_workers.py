"""Worker processes: what crashes, hangs, leaks or prints takes only its own episodes along."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.environment_pools import HOSTILE, in_loop, pool, rollout
from support.forks import ended

from rollmill.config.section import _registered
from rollmill.errors import ConfigError, EpisodeError, WorkflowError
from rollmill.rollout.environments.pool import EnvironmentPool, RunningEnvironment
from rollmill.types import Task
from rollmill_grading.errors import WorkerDiedError
from rollmill_grading.worker_process import WorkerFunction, WorkerProcess


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    before = set(psutil.Process().children(recursive=True))
    yield
    left = set(psutil.Process().children(recursive=True)) - before
    _, alive = psutil.wait_procs(left, timeout=20)
    assert not alive, [each.cmdline() for each in alive]


async def _living(stack: AsyncExitStack, found: EnvironmentPool, count: int) -> list[RunningEnvironment]:
    return [await stack.enter_async_context(found.one(rollout(index=index))) for index in range(count)]


def _pid(observation: object) -> int:
    return int(str(observation).split()[2])


@pytest.mark.slow
@in_loop
async def test_episodes_are_spread_over_processes_and_keep_their_state() -> None:
    found = pool(processes=2)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(found.close)
        living = await _living(stack, found, 4)
        first = [await each.reset() for each in living]
        assert len({_pid(each) for each in first}) == 2
        assert {str(each).rpartition(" ")[0] for each in first} == {"t:1 5"}  # a group begins alike
        for number in (1, 2, 3):
            results = await asyncio.gather(*(each.step("x") for each in living))
            assert [(each.observation, each.reward) for each in results] == [(f"x {number}", float(number))] * 4
            assert results[0].info == {"count": float(number)}
        counted = found.metrics()
        assert counted["environment/resets"] == 4
        assert counted["environment/steps"] == 12
        assert counted["environment/crashes"] == counted["environment/timeouts"] == counted["environment/restarts"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("action", ["die", "kill"])
@in_loop
async def test_a_process_that_ends_takes_its_own_episodes_along_and_is_replaced(action: str) -> None:
    found = pool(processes=2)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(found.close)
        living = await _living(stack, found, 4)
        pids = [_pid(await each.reset()) for each in living]
        if action == "kill":
            slow = [asyncio.ensure_future(living[0].step("sleep 20"))]
            await asyncio.sleep(0.2)
            os.kill(pids[0], signal.SIGKILL)
            with pytest.raises(
                EpisodeError, match=r"environment `Hostile` failed on task `t:1`: step ended the worker"
            ):
                await slow[0]
        else:
            with pytest.raises(EpisodeError, match="step ended the worker process"):
                await living[0].step("die")
        for each, pid in zip(living[1:], pids[1:], strict=True):
            if pid == pids[0]:
                with pytest.raises(EpisodeError, match="the worker process ended during a step"):
                    await each.step("x")
            else:
                assert (await each.step("x")).reward == 1.0
        [new] = await _living(stack, found, 1)
        assert _pid(await new.reset()) not in pids
        counted = found.metrics()
        assert counted["environment/crashes"] == 2
        assert counted["environment/restarts"] == 1


@pytest.mark.slow
@in_loop
async def test_a_process_killed_while_idle_gets_no_further_episodes() -> None:
    found = pool(processes=1)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(found.close)
        async with found.one(rollout()) as one:
            pid = _pid(await one.reset())
            os.kill(pid, signal.SIGKILL)
            deadline = time.monotonic() + 20
            while not ended(pid):
                assert time.monotonic() < deadline
                await asyncio.sleep(0.01)
            async with found.one(rollout()) as other:
                assert _pid(await other.reset()) != pid
        assert found.metrics()["environment/crashes"] == 0


@pytest.mark.slow
@in_loop
async def test_what_hangs_is_ended_and_counted() -> None:
    found = pool(processes=1, time_limit_s=2.0)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(found.close)
        hanging, other = await _living(stack, found, 2)
        await hanging.reset()
        await other.reset()
        with pytest.raises(EpisodeError, match=r"step took longer than environment.time_limit_s \(2 s\)"):
            await hanging.step("sleep 60")
        with pytest.raises(EpisodeError, match="ended because another episode's step took longer"):
            await other.step("x")
        counted = found.metrics()
        assert (counted["environment/timeouts"], counted["environment/crashes"]) == (1, 1)


@in_loop
async def test_what_exits_raises_or_returns_nonsense_fails_alone() -> None:
    found = pool(processes=1)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(found.close)
        living = await _living(stack, found, 2)
        pid = _pid(await living[0].reset())
        for action, text in (
            ("exit", "SystemExit: 3"),
            ("raise", "step raised ValueError: of its own"),
            ("huge", "at most 8388608 can be sent"),
        ):
            with pytest.raises(EpisodeError, match=text):
                await living[0].step(action)
        with pytest.raises(WorkflowError, match=r"Hostile.step returned a tuple; return a StepResult") as wrong:
            await living[0].step("tuple")
        assert not isinstance(wrong.value, EpisodeError)  # no retry helps
        with pytest.raises(WorkflowError, match=r"Hostile.step gave nan as reward; give a finite number"):
            await living[0].step("nan")
        with pytest.raises(WorkflowError, match=r"Hostile.step gave messages that are no JSON"):
            await living[0].step("set")
        with pytest.raises(WorkflowError, match=r"Hostile.reset gave a int as observation; give a text"):
            await living[0].reset(Task("n", "number"))
        assert _pid(await living[1].reset()) == pid
        assert found.metrics()["environment/crashes"] == 3


@in_loop
async def test_what_close_raises_is_told(caplog: pytest.LogCaptureFixture) -> None:
    found = pool(processes=1, note="raise")
    for _ in range(2):  # the second waits for the first one's close, in the same process
        async with found.one(rollout()) as one:
            await one.reset()
    await found.close()
    assert "environment `Hostile`: close raised ValueError: not closed" in caplog.text


def test_what_a_process_started_ends_though_it_has_ended_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "starts_a_child.py").write_text(
        "import os, subprocess\n\n\ndef load(setup):\n"
        "    with open(setup, 'w') as file:\n        print(subprocess.Popen(['sleep', '60']).pid, file=file)\n"
        "    os._exit(3)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    process = WorkerProcess()
    with pytest.raises(WorkerDiedError, match="exit status 3"):
        process.load(WorkerFunction("child", "starts_a_child:load"), str(tmp_path / "child"))
    child = int((tmp_path / "child").read_text())
    process.end()
    deadline = time.monotonic() + 10
    while not ended(child):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@in_loop
async def test_what_is_printed_disturbs_nothing() -> None:
    found = pool(processes=1)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(found.close)
        [one] = await _living(stack, found, 1)
        await one.reset()
        assert (await one.step("print")).observation == "print 1"
        assert (await one.step("x")).observation == "x 2"


@pytest.mark.slow
@in_loop
async def test_workers_are_replaced_after_enough_episodes_and_close_them(tmp_path: Path) -> None:
    note = tmp_path / "note"
    found = pool(processes=1, restart_after=2, note=str(note))
    pids = []
    async with AsyncExitStack() as stack:
        stack.push_async_callback(found.close)
        for _ in range(5):
            async with found.one(rollout()) as one:
                pids.append(_pid(await one.reset()))
                await one.step("x")
        assert [len({*pids[:2]}), len({*pids[2:4]}), len({*pids})] == [1, 1, 3]
        assert found.metrics()["environment/restarts"] == 2
        deadline = time.monotonic() + 10
        while note.read_text() != "closed 1\n" * 5:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)


@pytest.mark.slow
@in_loop
async def test_a_leak_ends_with_its_worker() -> None:
    found = pool(processes=1, memory_gb=0.25)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(found.close)
        small, large = await _living(stack, found, 2)
        pid = _pid(await small.reset())
        await large.reset()
        await large.step("leak 250")  # above the bound: its episodes go on, new ones live elsewhere
        assert (await small.step("x")).reward == 1.0
        [new] = await _living(stack, found, 1)
        assert _pid(await new.reset()) != pid
        with suppress(EpisodeError):  # above twice the bound: noticed while it lasts, or at its end
            await large.step("leak 400")
        with pytest.raises(EpisodeError, match=r"held more than twice environment.memory_gb \(0.25\)"):
            await small.step("x")


@in_loop
async def test_what_an_environment_started_ends_with_it() -> None:
    found = pool(processes=1)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(found.close)
        [one] = await _living(stack, found, 1)
        pid = _pid(await one.reset())
        await one.step("fork")
        assert len(psutil.Process(pid).children()) == 1


@pytest.mark.slow
@in_loop
async def test_a_cancelled_rollout_leaves_its_worker_at_work() -> None:
    found = pool(processes=1)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(found.close)
        [other] = await _living(stack, found, 1)
        pid = _pid(await other.reset())

        async def hold() -> None:
            async with found.one(rollout()) as one:
                await one.reset()
                await one.step("sleep 2")

        task = asyncio.ensure_future(hold())
        await asyncio.sleep(0.15)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert _pid(await other.reset()) == pid


@pytest.mark.slow
def test_workers_die_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    code = (
        "import asyncio, sys, time\n"
        "from environment_pools import pool, rollout\n"
        "async def main():\n"
        "    found = pool(processes=1)\n"
        "    async with found.one(rollout()) as one:\n"
        "        print(str(await one.reset()).split()[2], flush=True)\n"
        "        await one.step('sleep 60')\n"
        "asyncio.run(main())\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdout is not None
        worker = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    _, alive = psutil.wait_procs([worker], timeout=20)
    assert not alive


def test_a_class_that_other_processes_cannot_find_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollmill.config.section._registered", dict(_registered))
    text = HOSTILE.read_text().replace("class Hostile", "class Hidden")
    exec(compile(text, "text", "exec"), {"__name__": "__main__"})
    from rollmill.config.section import registered_sections

    [found] = [each for each in registered_sections("environment") if each.__name__ == "Hidden"]
    with pytest.raises(ConfigError, match="cannot find the class of environment `Hidden`"):
        EnvironmentPool(found.model_validate({"name": "Hidden", "processes": 1}))  # type: ignore[arg-type]


@pytest.mark.slow
@settings(max_examples=6, deadline=None)
@given(st.lists(st.lists(st.sampled_from(["x", "raise", "die", "sleep 5", "print"]), max_size=3), max_size=6))
def test_whatever_episodes_do_each_ends_and_the_pool_goes_on(plans: list[list[str]]) -> None:
    asyncio.run(_played(plans))


async def _played(plans: list[list[str]]) -> None:
    found = pool(processes=2, time_limit_s=1.0)

    async def play(plan: list[str]) -> str:
        try:
            async with found.one(rollout()) as one:
                await one.reset()
                for number, action in enumerate(plan, 1):
                    assert (await one.step(action)).reward == number
            return "ended"
        except EpisodeError:
            return "failed"

    try:
        outcomes = await asyncio.gather(*map(play, plans))
        harmless = all(action in ("x", "print") for plan in plans for action in plan)
        assert not harmless or set(outcomes) <= {"ended"}
        for plan, outcome in zip(plans, outcomes, strict=True):
            assert outcome == "failed" or not {"raise", "die", "sleep 5"} & {*plan}
        for _ in range(10):  # a worker may still be ending
            if await play(["x"]) == "ended":
                return
        raise AssertionError("the pool does not recover")
    finally:
        await found.close()
