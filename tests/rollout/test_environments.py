"""Environments in this process: threads, time limits, what methods may return; and what the policy is told."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.environment_pools import in_loop, pool, rollout

from rollmill.concurrency import FunctionThreads
from rollmill.errors import EpisodeError, WorkflowError
from rollmill.rollout.environments import StepResult
from rollmill.rollout.environments.base import observation_text, validate_observation, validate_step
from rollmill.types import Task


@in_loop
async def test_plain_methods_do_not_hold_up_the_event_loop() -> None:
    found = pool()
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0.01)

    ticking = asyncio.ensure_future(tick())
    async with found.one(rollout()) as one:
        await one.reset()
        before = ticks
        assert (await one.step("sleep 0.3")).reward == 1.0
        assert ticks > before + 3
    ticking.cancel()
    await found.close()


@in_loop
async def test_async_methods_and_messages() -> None:
    found = pool("Polite")
    async with found.one(rollout()) as one:
        observation = await one.reset()
        assert observation == [{"role": "user", "content": "What"}, {"role": "user", "content": "now?"}]
        assert observation_text(observation) == "What\nnow?"
        assert [(await one.step("a")).done, (await one.step("b")).done] == [False, True]
    await found.close()


@pytest.mark.slow
@in_loop
async def test_what_takes_too_long_fails_its_rollout_and_closes_later(tmp_path: Path) -> None:
    note = tmp_path / "note"
    found = pool(time_limit_s=1.0, note=str(note))
    async with found.one(rollout(Task("t:9", "go"))) as one:
        await one.reset()
        text = r"environment `Hostile` failed on task `t:9`: step took longer than environment.time_limit_s \(1 s\)"
        with pytest.raises(EpisodeError, match=text):
            await one.step("sleep 4")
    assert not note.exists()  # close and step never run at the same time
    deadline = time.monotonic() + 20
    while not note.exists() or note.read_text() != "closed 1\n":
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)
    assert found.metrics()["environment/timeouts"] == 1
    await found.close()


@in_loop
async def test_what_it_raises_or_returns_wrongly_is_told_apart() -> None:
    found = pool()
    async with found.one(rollout()) as one:
        await one.reset()
        with pytest.raises(EpisodeError, match="step raised ValueError: of its own"):
            await one.step("raise")
        with pytest.raises(WorkflowError, match=r"Hostile.step returned a tuple") as wrong:
            await one.step("tuple")
        assert not isinstance(wrong.value, EpisodeError)
        with pytest.raises(EpisodeError, match="SystemExit: 3"):
            await one.step("exit")
    assert found.metrics()["environment/crashes"] == 2
    await found.close()


@in_loop
async def test_threads_end_with_the_pool() -> None:
    found = pool()
    async with found.one(rollout()) as one:
        await one.reset()
    await found.close()
    await found.close()
    deadline = time.monotonic() + 10
    while any(each.name == "rollmill-environment" for each in threading.enumerate()):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


@in_loop
async def test_a_call_that_was_cancelled_and_never_returns_holds_no_thread_of_others() -> None:
    threads, gate = FunctionThreads("tool", WorkflowError, limit=1, most_stuck=0), threading.Event()
    hanging = asyncio.ensure_future(threads.call("hang", gate.wait, 0.1))
    await asyncio.sleep(0.05)
    waiting = asyncio.ensure_future(threads.call("next", lambda: 7, 10.0))
    await asyncio.sleep(0.05)
    hanging.cancel()
    assert await asyncio.wait_for(waiting, 10) == 7
    with pytest.raises(WorkflowError, match="`more` is not called: 1 threads are stuck in `hang` and cannot be ended"):
        await threads.call("more", lambda: 7, 10.0)
    gate.set()
    threads.close()


def test_halves_of_surrogate_pairs_are_replaced() -> None:
    assert validate_observation("a\ud800b", "X.reset") == "a?b"


@given(st.floats(allow_nan=False, allow_infinity=False), st.booleans(), st.text())
def test_numbers_of_any_library_are_numbers(reward: float, done: bool, text: str) -> None:
    info = {"a": np.float64(reward), "b": np.bool_(done), "c": text, "d": np.arange(3)}
    found = validate_step(StepResult(text, np.float64(reward), np.bool_(done), info), "X.step")  # type: ignore[arg-type]
    assert found == StepResult(text, reward, done, {"a": reward, "b": float(done)})
    assert type(found.reward) is float
    assert type(found.done) is bool


@pytest.mark.parametrize(
    "wrong", [None, 3, [3], [{"content": "no role"}], {"role": "user", "content": "no list"}, b"x"]
)
def test_what_is_no_observation_is_refused(wrong: object) -> None:
    with pytest.raises(TypeError, match=r"X.reset gave .* as observation; give a text, a picture, a list"):
        validate_observation(wrong, "X.reset")
