"""Rate limits by a clock that only sleeping moves, and the cache on disk."""

from __future__ import annotations

import asyncio
import math
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.chat_server import Scripted, chat_server
from support.reward_helpers import judged

from rollmill.errors import ConfigError
from rollmill.rewards import build_reward_manager
from rollmill.rewards.builtin.judge import JudgeReward
from rollmill.rewards.judges.chat import CachedChatModel, ChatModelReply, ChatReplyStore, ChatSamplingParams
from rollmill.rewards.judges.endpoint import WINDOW_S, RateLimiter


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
    window = RateLimiter([limit], lambda: clock.now, clock.sleep)
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
    window = RateLimiter([3], lambda: clock.now, clock.sleep)

    async def main() -> list[float]:
        times = []
        for _ in range(7):
            await window.enter(1)
            times.append(clock.now)
        return times

    times = asyncio.run(main())
    assert times[:3] == [0, 0, 0]
    assert times[3:6] == pytest.approx([60] * 3, abs=0.01)
    assert times[6] == pytest.approx(120, abs=0.01)


def test_who_waits_for_one_window_takes_no_place_in_another() -> None:
    """A request that waits for tokens is not sent yet, so it does not count as sent: no burst follows."""
    clock = Clock()
    limits = RateLimiter([2, 100], lambda: clock.now, clock.sleep)
    passed: list[tuple[float, int]] = []

    async def one(tokens: int) -> None:
        await limits.enter(1, tokens)
        passed.append((clock.now, tokens))

    async def main() -> None:
        await asyncio.gather(*(one(tokens) for tokens in (1000, 1, 2, 3, 4)))

    asyncio.run(main())
    assert [tokens for _, tokens in passed] == [1000, 1, 2, 3, 4]
    assert [when for when, _ in passed] == pytest.approx([0, 60, 60, 120, 120], abs=0.01)


def test_a_cancelled_request_leaves_the_queue() -> None:
    clock = Clock()
    limits = RateLimiter([1, math.inf], lambda: clock.now, lambda seconds: asyncio.sleep(3600))

    async def main() -> None:
        await limits.enter(1, 5)
        waiting = asyncio.ensure_future(limits.enter(1, 5))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        clock.now += WINDOW_S + 1
        await limits.enter(1, 5)

    asyncio.run(main())


# -- the cache ---------------------------------------------------------------------------------------------------

GREEDY = ChatSamplingParams(0.0, 8, 0)
QUESTION = [{"role": "user", "content": "é?"}]


def test_what_is_kept_is_not_asked_again(tmp_path: Path) -> None:
    model, store = (
        Scripted(lambda text, seed, index: f"{text}/{seed}/{index}"),
        ChatReplyStore(tmp_path / "new" / "cache"),
    )
    cached = CachedChatModel(model, store)
    first = asyncio.run(cached.chat(QUESTION, GREEDY, [0, 1]))
    again = asyncio.run(cached.chat(QUESTION, GREEDY, [2, 1, 0]))
    assert [each.text for each in again] == ["é?/0/2", "é?/0/1", "é?/0/0"]
    assert [each.text for each in first] == ["é?/0/0", "é?/0/1"]
    assert [each.cached for each in again] == [False, True, True]
    assert model.asked == 3
    for sampling in (
        ChatSamplingParams(0.1, 8, 0),
        ChatSamplingParams(0.0, 9, 0),
        ChatSamplingParams(0.0, 8, 1),
        ChatSamplingParams(0.0, 8, 0, {"type": 1}),
    ):
        assert not asyncio.run(cached.chat(QUESTION, sampling, [0]))[0].cached
    model.identity = "other"
    assert not asyncio.run(CachedChatModel(model, store).chat(QUESTION, GREEDY, [0]))[0].cached
    store.close()
    store.close()


WRITER = """
import sys
from pathlib import Path
from rollmill.rewards.judges.chat import ChatReplyStore
from rollmill.rewards.judges.chat import ChatModelReply
print("ready", flush=True)
sys.stdin.readline()
for _ in range(10):  # who opens or leaves a file has it alone for a moment
    store = ChatReplyStore(Path(sys.argv[1]))
    for number in range(50):
        store.put(f"{number}", ChatModelReply(sys.argv[2], "stop"))
        assert store.get(f"{number}") is not None
    store.close()
"""


@pytest.mark.slow
def test_several_processes_share_a_cache(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", WRITER, str(tmp_path / "cache")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    workers: list[subprocess.Popen[str]] = [subprocess.Popen([*argv, f"{who}"], **pipes) for who in range(4)]  # type: ignore[call-overload]
    for worker in workers:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "ready\n"
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.write("\n")
        worker.stdin.flush()
    for worker in workers:
        worker.communicate()
    assert [worker.returncode for worker in workers] == [0] * 4
    store = ChatReplyStore(tmp_path / "cache")
    found = [store.get(f"{number}") for number in range(50)]
    assert all(reply is not None and reply.text in "0123" and reply.cached for reply in found)
    store.put("0", ChatModelReply("later", "stop"))
    assert store.get("0") == found[0]


def test_who_is_there_first_is_waited_for(tmp_path: Path) -> None:
    """SQLite itself gives up at once where it would change the journal of a file that another process writes."""
    other = sqlite3.connect(tmp_path / "cache", isolation_level=None, check_same_thread=False)
    other.execute("CREATE TABLE mine (x)")
    other.execute("BEGIN IMMEDIATE")
    leaving = threading.Timer(0.2, other.close)
    leaving.start()
    store = ChatReplyStore(tmp_path / "cache")
    leaving.join()
    store.put("a", ChatModelReply("b", "stop"))
    assert store.get("a") == ChatModelReply("b", "stop", cached=True)


def test_a_second_run_asks_nothing(tmp_path: Path) -> None:
    with chat_server(['{"score": 4}']) as server:
        config = JudgeReward(name="judge", endpoint=server.url, model="m", cache=tmp_path / "c.sqlite", prompt_price=1)
        for calls in (1, 0):
            with build_reward_manager([config]) as judge:
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
            build_reward_manager([config])
