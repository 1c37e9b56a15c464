"""Rate limits by a clock that only sleeping moves, and the cache on disk."""

from __future__ import annotations

import asyncio
import multiprocessing
from pathlib import Path

import pytest
from chat_server import Scripted, chat_server
from hypothesis import given
from hypothesis import strategies as st
from reward_helpers import judged

from rollmill.config.rewards import JudgeReward
from rollmill.core.errors import ConfigError
from rollmill.rewards import build_judge
from rollmill.rewards.judges.cache import Cached, Store
from rollmill.rewards.judges.chat import Reply, Sampling
from rollmill.rewards.judges.limits import WINDOW_S, Window


class Clock:
    """Seconds that pass while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        await asyncio.sleep(0)


@given(
    st.integers(1, 20),
    st.lists(st.tuples(st.integers(1, 30), st.floats(0, 40)), min_size=1, max_size=40),
)
def test_no_window_of_a_minute_holds_more_than_the_limit(limit: int, arrivals: list[tuple[int, float]]) -> None:
    clock = Clock()
    window = Window(limit, lambda: clock.now, clock.sleep)
    passed: list[tuple[float, int]] = []

    async def one(units: int) -> None:
        await window.enter(units)
        passed.append((clock.now, units))

    async def main() -> None:
        pending = []
        for units, pause in arrivals:
            clock.now += pause
            pending.append(asyncio.ensure_future(one(units)))
            await asyncio.sleep(0)
        await asyncio.gather(*pending)

    asyncio.run(main())
    assert [units for _, units in passed] == [units for units, _ in arrivals]  # first come, first served
    for start, _ in passed:
        inside = [units for when, units in passed if start <= when <= start + WINDOW_S]
        assert sum(inside) <= limit or len(inside) == 1


def test_a_free_window_makes_nobody_wait() -> None:
    clock = Clock()
    window = Window(3, lambda: clock.now, clock.sleep)

    async def main() -> list[float]:
        times = []
        for _ in range(7):
            await window.enter()
            times.append(clock.now)
        return times

    times = asyncio.run(main())
    assert times[:3] == [0, 0, 0]
    assert times[3:6] == pytest.approx([60] * 3, abs=0.01)
    assert times[6] == pytest.approx(120, abs=0.01)


# -- the cache ---------------------------------------------------------------------------------------------------

GREEDY = Sampling(0.0, 8, 0)
QUESTION = [{"role": "user", "content": "é?"}]


def test_what_is_kept_is_not_asked_again(tmp_path: Path) -> None:
    model, store = Scripted(lambda text, seed, index: f"{text}/{seed}/{index}"), Store(tmp_path / "new" / "cache")
    cached = Cached(model, store)
    first = asyncio.run(cached.chat(QUESTION, GREEDY, [0, 1]))
    again = asyncio.run(cached.chat(QUESTION, GREEDY, [2, 1, 0]))
    assert [each.text for each in again] == ["é?/0/2", "é?/0/1", "é?/0/0"]
    assert [each.text for each in first] == ["é?/0/0", "é?/0/1"]
    assert [each.cached for each in again] == [False, True, True]
    assert model.asked == 3
    for sampling in (Sampling(0.1, 8, 0), Sampling(0.0, 9, 0), Sampling(0.0, 8, 1), Sampling(0.0, 8, 0, {"type": 1})):
        assert not asyncio.run(cached.chat(QUESTION, sampling, [0]))[0].cached
    model.identity = "other"
    assert not asyncio.run(Cached(model, store).chat(QUESTION, GREEDY, [0]))[0].cached
    store.close()
    store.close()


def _writer(path: Path, who: int) -> None:
    store = Store(path)
    for number in range(50):
        store.put(f"{number}", Reply(f"{who}", "stop"))
        assert store.get(f"{number}") is not None
    store.close()


def test_several_processes_share_a_cache(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_writer, args=(tmp_path / "cache", who)) for who in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0] * 4
    store = Store(tmp_path / "cache")
    found = [store.get(f"{number}") for number in range(50)]
    assert all(reply is not None and reply.text in "0123" and reply.cached for reply in found)
    store.put("0", Reply("later", "stop"))
    assert store.get("0") == found[0]


def test_a_second_run_asks_nothing(tmp_path: Path) -> None:
    with chat_server(['{"score": 4}']) as server:
        config = JudgeReward(name="judge", endpoint=server.url, model="m", cache=tmp_path / "c.sqlite", prompt_price=1)
        for calls in (1, 0):
            with build_judge([config]) as judge:
                assert judged(judge, "5", "a").reward == pytest.approx(0.4)
                counters = judge.counters()
                assert (counters["judge/calls"], counters["judge/cached"]) == (calls, 1 - calls)
                assert (counters["judge/cost"] > 0) == (calls == 1)
        assert len(server.requests) == 1


def test_a_cache_that_cannot_be_used_is_named_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no database, but long enough to be taken for one" * 50)
    for path in (tmp_path / "text", tmp_path):
        config = JudgeReward(name="judge", endpoint="http://localhost/v1", model="m", cache=path)
        with pytest.raises(ConfigError, match=f"cache {path} cannot be used"):
            build_judge([config])
