"""Virtual time, simulated processes, links and engines."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import numpy as np
import pytest

from rollmill.apps.plan.simulation.clock import (
    ProcessKilled,
    SimulatedProcess,
    SimulationStuckError,
    VirtualLoop,
    virtual_time,
)
from rollmill.apps.plan.simulation.engine import SimulatedEngine, SimulationCosts, shown_digest, simulated_tokens
from rollmill.apps.plan.simulation.network import SimulatedLink
from rollmill.config.rollout import SamplingConfig
from rollmill.engines.base import CompletionPrefix, GenerationRequest
from rollmill.types import Completion, StopReason

HOUR = 3600.0
COSTS = SimulationCosts([[4, 10]], [1.0], 0.1, 0.05, group_s=0.2, receive_s=0.3)


def test_the_clock_jumps_to_the_next_timer_and_the_real_one_comes_back() -> None:
    before, real = time.monotonic(), time.time
    with virtual_time() as loop:
        began = time.time()
        loop.run_until_complete(asyncio.sleep(HOUR))
        time.sleep(HOUR)
        assert loop.time() == pytest.approx(2 * HOUR)
        assert time.time() - began == pytest.approx(2 * HOUR)
        assert time.perf_counter() == time.monotonic() == loop.time()
    assert time.time is real
    assert time.monotonic() - before < HOUR


def test_waiting_for_nothing_is_an_error_and_so_is_work_without_time() -> None:
    async def spin() -> None:
        while True:
            await asyncio.sleep(0)

    with virtual_time() as loop:
        with pytest.raises(SimulationStuckError, match="nothing is left to happen"):
            loop.run_until_complete(loop.create_future())
        with pytest.raises(SimulationStuckError, match="no time passes"):
            loop.run_until_complete(spin())


def test_a_function_in_a_thread_takes_its_time_beside_others() -> None:
    async def beside() -> tuple[float, float]:
        work = asyncio.ensure_future(asyncio.to_thread(time.sleep, 5.0))
        await asyncio.sleep(1.0)
        first = time.monotonic()
        await work
        return first, time.monotonic()

    with virtual_time() as loop:
        assert loop.run_until_complete(beside()) == (pytest.approx(1.0), pytest.approx(5.0))


def test_a_killed_process_does_nothing_outside_any_more() -> None:
    async def killed(loop: VirtualLoop) -> list[bytes]:
        server, client = SimulatedProcess(loop, "server"), SimulatedProcess(loop, "client")
        (reader, kept), (_, writer) = SimulatedLink(loop, 0.01, 0).connect(server, client)

        async def talk() -> None:
            try:
                writer.write(b"before")
                await asyncio.sleep(HOUR)
            finally:
                writer.write(b"after")

        client.spawn(talk())
        await asyncio.sleep(1.0)
        await client.kill()
        with pytest.raises(ProcessKilled):
            client.require_alive()
        await asyncio.sleep(1.0)
        writer.transport.abort()
        assert not kept.transport.is_closing()  # the end of the stream is under way
        return [await reader.read(100), await reader.read(100)]

    with virtual_time() as loop:
        assert loop.run_until_complete(killed(loop)) == [b"before", b""]


def test_a_partition_holds_messages_and_keeps_their_order() -> None:
    async def sent(loop: VirtualLoop) -> list[tuple[int, float]]:
        link, arrived = SimulatedLink(loop, 0.01, 3), list[tuple[int, float]]()
        link.held_until = 10.0
        for number in range(20):
            link.send(lambda number=number: arrived.append((number, loop.time())), 0)
        await asyncio.sleep(11.0)
        return arrived

    with virtual_time() as loop:
        arrived = loop.run_until_complete(sent(loop))
    assert [number for number, _ in arrived] == list(range(20))
    assert arrived[0][1] == pytest.approx(10.0)


def engine(loop: VirtualLoop, *, shares_loop: bool, max_sequences: int = 8) -> SimulatedEngine:
    made = SimulatedEngine(
        SimulatedProcess(loop, "one"), COSTS, {0: 11, 1: 22}, max_sequences=max_sequences, shares_loop=shares_loop
    )
    made.weights_updated(0)
    return made


def request(n: int = 2, prefixes: tuple[CompletionPrefix | None, ...] = ()) -> GenerationRequest:
    return GenerationRequest([1, 2], SamplingConfig(max_new_tokens=50), n=n, seed=5, prefixes=prefixes)


@pytest.mark.parametrize("shares_loop", [False, True])
def test_an_engine_takes_the_time_of_its_passes(shares_loop: bool) -> None:
    """Two rows for 4 passes and one for 6 more, after what the group and new weights cost."""
    with virtual_time() as loop:
        one = engine(loop, shares_loop=shares_loop)
        done = loop.run_until_complete(one.generate(request()))
        started = 0.2 + (0.0 if shares_loop else 0.3)
        assert [len(each.token_ids) for each in done] == [4, 10]
        assert loop.time() == pytest.approx(started + 4 * 0.2 + 6 * 0.15)
        assert one.tokens_generated == 14
        assert (done[1].token_ids == simulated_tokens(5, 1, np.arange(10), 11)).all()


def test_new_weights_in_the_middle_show_in_versions_and_log_probs() -> None:
    async def updated(one: SimulatedEngine) -> Completion:
        work = asyncio.ensure_future(one.generate(request()))
        await asyncio.sleep(0.5 + 2 * 0.2 + 0.01)
        one.weights_updated(1)
        return (await work)[1]

    with virtual_time() as loop:
        done = loop.run_until_complete(updated(engine(loop, shares_loop=False)))
    assert done.versions.tolist() == [0] * 2 + [1] * 8
    assert done.logprobs.tolist() == [-shown_digest(11)] * 2 + [-shown_digest(22)] * 8
    assert done.token_ids[2:].tolist() == simulated_tokens(5, 1, np.arange(2, 10), 22).tolist()


def test_interrupted_completions_go_on_from_their_tokens() -> None:
    async def interrupted(one: SimulatedEngine) -> tuple[list[Completion], list[Completion]]:
        work = asyncio.ensure_future(one.generate(request()))
        while one.tokens_generated < 6:
            await asyncio.sleep(0)
        one.interrupt()
        parts = await work
        prefixes = tuple(
            CompletionPrefix(each.token_ids, each.logprobs, each.kept_logmass, each.versions) for each in parts
        )
        return parts, await one.generate(request(prefixes=prefixes))

    with virtual_time() as loop:
        parts, whole = loop.run_until_complete(interrupted(engine(loop, shares_loop=True)))
        at_once = loop.run_until_complete(engine(loop, shares_loop=True).generate(request()))
    assert [each.stop_reason for each in parts] == [StopReason.ABORTED] * 2
    assert [len(each.token_ids) for each in parts] == [3, 3]
    assert [each.token_ids.tolist() for each in whole] == [each.token_ids.tolist() for each in at_once]


def test_a_slow_engine_and_one_with_few_places() -> None:
    with virtual_time() as loop:
        one = engine(loop, shares_loop=False, max_sequences=1)
        one.set_slowness(2.0)
        loop.run_until_complete(one.generate(replace(request(), seed=1)))
        assert loop.time() == pytest.approx(0.5 + 2 * 14 * 0.15)
