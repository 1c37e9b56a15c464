"""Endpoints of judges that go away: judging waits until they are back, for a bounded time."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.chat_server import Answer, ChatProcess, ChatServer, chat_server, failing, shown
from support.forks import Forks, send
from support.reward_helpers import completion, judged, task
from support.tiny import metrics, tiny_run

from rollmill.config.rewards import RewardManagerConfig
from rollmill.errors import EndpointLostError, RewardError
from rollmill.rewards import RewardManager, RewardResult, build_reward_manager
from rollmill.rewards.builtin.judge import JudgeReward
from rollmill.rewards.judges import breaker as breaker_module
from rollmill.rewards.judges import endpoint as endpoint_module
from rollmill.rewards.judges.breaker import GO, PROBE, WAIT, CircuitBreaker
from rollmill.trackers.heartbeat import read_heartbeats
from rollmill.waiting import OUTAGES

SEVEN = 'It is fine.\n{"score": 7}'
MANY = 8


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(endpoint_module, "MIN_BACKOFF_S", 0.01)
    monkeypatch.setattr(endpoint_module, "MAX_PROBE_PAUSE_S", 0.05)
    monkeypatch.setattr(endpoint_module, "_LOOK_S", 0.01)
    yield
    assert not OUTAGES.current()


def reward(url: str, **keys: Any) -> JudgeReward:
    return JudgeReward(name="judge", endpoint=url, model="m", **keys)


async def score_many(judge: RewardManager) -> list[RewardResult]:
    return list(await asyncio.gather(*(judge.score(task("5"), completion(f"r{i}", i)) for i in range(MANY))))


async def until(happened: Any) -> None:
    async with asyncio.timeout(60):
        while not happened():
            await asyncio.sleep(0.005)


@pytest.mark.parametrize(
    "trouble",
    [
        failing(500, "oh"),
        failing(503, "later", **{"Retry-After": "0.02"}),
        Answer(drop=True),
        Answer(body=b"<html>Bad gateway</html>", headers={"Content-Type": "text/html"}),
    ],
    ids=["500", "503", "drop", "proxy"],
)
def test_an_endpoint_that_is_away_pauses_judging(trouble: Answer) -> None:
    """One request at a time finds out whether it is back; then all of the others are sent, and none is late."""
    down = False

    async def scenario(judge: RewardManager, server: ChatServer) -> list[RewardResult]:
        nonlocal down
        await score_many(judge)
        down, seconds = True, OUTAGES.seconds()
        pending = asyncio.ensure_future(score_many(judge))
        await until(OUTAGES.current)
        await until(lambda: server.open == 0)
        sent, server.most = len(server.requests), 0
        await until(lambda: len(server.requests) >= sent + 5)
        assert server.most == 1
        assert {shown(body) for body in server.requests[sent:]} == {"Say yes."}
        [outage] = OUTAGES.current()
        assert outage.name == f"the judge m at {server.url}"
        assert OUTAGES.seconds() > seconds
        down = False
        return await pending

    with (
        chat_server(lambda body: trouble if down else SEVEN) as server,
        build_reward_manager([reward(server.url)]) as judge,
    ):
        found = asyncio.run(scenario(judge, server))
    assert [each.outcomes["judge"] for each in found] == ["ok"] * MANY


def test_the_time_away_is_not_counted_as_the_time_of_a_judgement() -> None:
    """The outage is longer than both deadlines."""
    down = False

    async def scenario(judge: RewardManager) -> list[RewardResult]:
        nonlocal down
        await score_many(judge)
        down = True
        pending = asyncio.ensure_future(score_many(judge))
        await until(OUTAGES.current)
        await asyncio.sleep(1.5)
        down = False
        return await pending

    with (
        chat_server(lambda body: failing(500, "oh") if down else SEVEN) as server,
        build_reward_manager([reward(server.url, deadline_s=1.0)], RewardManagerConfig(deadline_s=1.4)) as judge,
    ):
        found = asyncio.run(scenario(judge))
    assert [each.outcomes["judge"] for each in found] == ["ok"] * MANY


def test_an_endpoint_that_stays_away_ends_the_run() -> None:
    down = False
    with (
        chat_server(lambda body: failing(503, "loading") if down else SEVEN) as server,
        build_reward_manager([reward(server.url, away_s=0.3)]) as judge,
    ):
        judged(judge, "5", "a")
        down = True
        with pytest.raises(EndpointLostError, match=r"did not answer for \d+ s \(status 503 \(loading\)\)") as caught:
            judged(judge, "5", "b")
        with pytest.raises(EndpointLostError):
            judged(judge, "5", "c")
    assert f"the judge m at {server.url}" in str(caught.value)
    assert "resume the run; raise away_s" in str(caught.value)


def test_a_key_that_is_refused_after_a_restart_ends_the_run_at_once() -> None:
    replies: list[Answer | str] = [SEVEN, *[failing(500, "oh")] * 4, failing(401, "no")]
    with (
        chat_server(replies) as server,
        build_reward_manager([reward(server.url)]) as judge,
    ):
        judged(judge, "5", "a")
        with pytest.raises(RewardError, match=r"status 401 \(no\), the key is refused") as caught:
            judged(judge, "5", "b")
    assert not isinstance(caught.value, EndpointLostError)


def test_an_endpoint_that_says_when_to_come_back_is_not_asked_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """It answers with 429 and a time beyond the deadline of a request."""
    waits: list[float] = []
    probed = CircuitBreaker.probed

    def record(breaker: CircuitBreaker, reason: str, wait_s: float, patience_s: float) -> None:
        waits.append(wait_s)
        probed(breaker, reason, min(wait_s, 0.05), patience_s)

    monkeypatch.setattr(CircuitBreaker, "probed", record)
    replies: list[Answer | str] = [SEVEN, *[failing(429, "slow", **{"Retry-After": "500"})] * 3, SEVEN]
    with (
        chat_server(replies) as server,
        build_reward_manager([reward(server.url)]) as judge,
    ):
        assert [judged(judge, "5", text).outcomes["judge"] for text in "ab"] == ["ok", "ok"]
    assert waits == [500.0, 500.0]


def test_a_response_that_takes_the_endpoint_down_is_given_up() -> None:
    """Else it would be sent again each time that the endpoint is back."""
    hurt = 0

    def script(body: dict[str, Any]) -> Answer | str:
        nonlocal hurt
        if "poison" in shown(body):
            hurt = 2
        hurt -= 1
        return Answer(drop=True) if hurt >= 0 else SEVEN

    with (
        chat_server(script) as server,
        build_reward_manager([reward(server.url, timeout_reward=-1)]) as judge,
    ):
        judged(judge, "5", "a")
        assert judged(judge, "5", "poison").outcomes == {"judge": "timeout"}
        assert judged(judge, "5", "b").outcomes == {"judge": "ok"}


def test_all_models_at_an_endpoint_share_what_is_known_of_it() -> None:
    """Rewards with other settings, and those of held-out tasks, which have a manager of their own."""
    down = False

    async def scenario(server: ChatServer, *judges: RewardManager) -> None:
        nonlocal down
        for judge in judges:
            await score_many(judge)
        down = True
        pending = [asyncio.ensure_future(score_many(judge)) for judge in judges]
        await until(OUTAGES.current)
        await until(lambda: server.open == 0)
        sent, server.most = len(server.requests), 0
        await until(lambda: len(server.requests) >= sent + 5)
        assert server.most == 1
        down = False
        for found in await asyncio.gather(*pending):
            assert [each.outcomes["judge"] for each in found] == ["ok"] * MANY

    with (
        chat_server(lambda body: Answer(drop=True) if down else SEVEN) as server,
        build_reward_manager([reward(server.url)]) as one,
        build_reward_manager([reward(server.url, try_s=50)]) as other,
    ):
        asyncio.run(scenario(server, one, other))
    assert not breaker_module._BREAKERS


def test_one_probe_at_a_time() -> None:
    now = 0.0
    breaker = CircuitBreaker("x", lambda: now)
    assert not any(breaker.failed() for _ in range(5))  # it has never answered
    breaker.replied()
    assert [breaker.failed() for _ in range(4)] == [False, False, True, False]
    assert breaker.turn() == WAIT
    breaker.probed("still no", 10.0, 60.0)
    breaker.end_probe()
    assert (breaker.turn(), breaker.failed(), breaker.claim_probe()) == (WAIT, False, False)
    now = 10.0
    assert (breaker.turn(), breaker.turn(), breaker.away_s()) == (PROBE, WAIT, 10.0)
    breaker.end_probe()  # it was cancelled
    assert breaker.turn() == PROBE
    breaker.replied()
    breaker.end_probe()
    assert (breaker.turn(), breaker.away_s(), breaker.probes) == (GO, 0.0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.thorough)])
def test_a_run_survives_its_judges_restart(server: Forks, tmp_path: Path, number: signal.Signals) -> None:
    """The judge is away for longer than reward_settings.deadline_s, rollout.deadline_s and supervise.stall_s."""
    with ChatProcess(SEVEN) as judge:
        section = {"name": "judge", "endpoint": judge.url, "model": "m", "deadline_s": 4, "try_s": 1}
        tiny_run(
            tmp_path,
            stages=None,
            algorithm={"name": "grpo"},
            evaluation=None,
            steps=30,
            rewards=[section],
            reward_settings={"deadline_s": 6},
            rollout={"deadline_s": 12},
            supervise={"stall_s": 10.0},
        )
        server.start("run", "run.yaml", "--out", "out", folder=tmp_path)
        file = tmp_path / "out/metrics.jsonl"
        assert server.reaches(lambda: file.is_file() and file.read_text().count("\n") >= 3)
        judge.send(number)

        def waits() -> bool:
            return any("the judge m at" in each.waits_for for each in read_heartbeats(tmp_path / "out"))

        assert server.reaches(waits)
        time.sleep(14)
        if number is signal.SIGKILL:
            judge.start()
        else:
            judge.send(signal.SIGCONT)
        done = server.wait()
    assert done.code == 0, done.err
    assert f"the judge m at {judge.url} does not answer (" in done.out
    assert "answers again after " in done.out
    rows = metrics(tmp_path / "out")
    assert len(rows) == 30
    assert sum(row["reward/timeouts"] for row in rows) == 0
    assert sum(row.get("judging/away_seconds", 0) for row in rows) > 12
    summary = json.loads((tmp_path / "out/summary.json").read_text())
    assert (summary["status"], summary.get("restarts", 0)) == ("done", 0)


@pytest.mark.slow
def test_a_run_that_waits_for_its_judge_can_be_interrupted_and_goes_on(server: Forks, tmp_path: Path) -> None:
    """With completions of later steps that wait for their rewards."""
    with ChatProcess(SEVEN) as judge:
        section = {"name": "judge", "endpoint": judge.url, "model": "m"}
        changes: dict[str, Any] = {"stages": None, "algorithm": {"name": "grpo"}, "evaluation": None}
        tiny_run(tmp_path, **changes, steps=12, max_staleness=2, rewards=[section])
        server.start("run", "run.yaml", "--out", "out", folder=tmp_path)
        file = tmp_path / "out/metrics.jsonl"
        assert server.reaches(lambda: file.is_file() and file.read_text().count("\n") >= 3)
        judge.send(signal.SIGKILL)
        assert server.reaches(lambda: any("the judge m at" in e.waits_for for e in read_heartbeats(tmp_path / "out")))
        send(server.pid, signal.SIGINT)
        done = server.wait()
        assert done.code == 130, done.err
        steps = len(metrics(tmp_path / "out"))
        assert (tmp_path / f"out/checkpoints/step-{steps:06d}").is_dir()
        judge.start()
        resumed = server.run("resume", "out", folder=tmp_path)
    assert resumed.code == 0, resumed.err
    rows = metrics(tmp_path / "out")
    assert [row["step"] for row in rows] == list(range(1, 13))
    assert max(row["staleness/max"] for row in rows) <= 2
