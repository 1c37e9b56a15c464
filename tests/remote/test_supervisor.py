"""What supervisor and trainer tell each other, without Ray."""

from __future__ import annotations

import asyncio
import pickle
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.tiny import tiny_run

import rollmill
from rollmill import ray_session
from rollmill.errors import ConfigError, DeadlineError, TrainerRankLostError
from rollmill.orchestrator.interrupt import Interrupted, Interrupts
from rollmill.ray_session import _why_not
from rollmill.remote.connection import portable_error


def test_without_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    path = tiny_run(tmp_path, placement="ray")
    with pytest.raises(ConfigError, match=r"placement: ray needs the library: pip install 'rollmill\[ray\]'"):
        rollmill.run(path, out=tmp_path / "out")


@pytest.mark.parametrize(
    "error", [DeadlineError("a", "b", 3.0, "Wait."), TrainerRankLostError("rank 1"), ConfigError("no")]
)
def test_errors_for_users_travel_as_they_are(error: Exception) -> None:
    found = pickle.loads(pickle.dumps(portable_error(error, "the process that trains")))
    assert (type(found), str(found), vars(found)) == (type(error), str(error), vars(error))


class Stubborn(Exception):  # noqa: N818
    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


@pytest.mark.parametrize("error", [ValueError("7"), Stubborn(7, 8)])
def test_other_errors_travel_with_their_traceback(error: Exception) -> None:
    try:
        raise error
    except Exception as raised:
        found = pickle.loads(pickle.dumps(portable_error(raised, "the process that trains")))
    text = "\n".join([str(found), *getattr(found, "__notes__", [])])
    assert "raise error" in text
    assert "7" in text


def test_a_request_of_another_thread_interrupts() -> None:
    interrupts = Interrupts()
    assert not interrupts.request(), "nothing has begun"

    async def work() -> None:
        interrupts.requested = False
        with interrupts.installed():
            timer.start()
            await interrupts.guard(asyncio.sleep(60))

    answers: list[bool] = []
    timer = threading.Timer(0.05, lambda: answers.append(interrupts.request()))
    with pytest.raises(Interrupted):
        asyncio.run(work())
    timer.join()
    assert answers == [True]
    assert interrupts.request(), "it has ended by itself"


def test_a_ray_that_wants_a_token_is_told_from_none() -> None:
    refused = ConnectionError("Failed to connect to Ray cluster at HOST:6379")
    refused.__cause__ = RuntimeError("Failed to connect to GCS: Unauthenticated: RPC error: InvalidAuthToken")
    assert "is protected, and this process has not its token; set RAY_AUTH_MODE=token" in _why_not("HOST:6379", refused)
    assert _why_not("auto", ConnectionError("nothing")) == "no Ray at auto: nothing; start one with `ray start`"


def test_a_process_joins_one_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray", reason="needs the extra `ray`")
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray_session, "_joined_address", [None])
    with pytest.raises(ConfigError, match=r"placement\.address: this process has joined a Ray of its own before"):
        ray_session.join("HOST:6379")


@pytest.mark.parametrize("failures", [1, 2])
def test_a_ray_that_starts_too_slowly_is_started_once_more(monkeypatch: pytest.MonkeyPatch, failures: int) -> None:
    ray = pytest.importorskip("ray", reason="needs the extra `ray`")
    tried: list[str] = []

    def init(**options: Any) -> SimpleNamespace:
        tried.append(options["address"])
        if len(tried) <= failures:
            raise Exception("The current node timed out during startup.")  # as Ray does
        return SimpleNamespace(address_info={"gcs_address": "HOST:1"})

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray_session, "_joined_address", [])
    if failures == 1:
        assert ray_session.join(None) == "HOST:1"
    else:
        with pytest.raises(ConfigError, match="took longer to start than it waits for them"):
            ray_session.join(None)
    assert tried == ["local"] * 2


def test_the_address_of_a_ray_client_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"placement\.address: Ray Client cannot start runs; give HOST:PORT"):
        rollmill.run(tiny_run(tmp_path, placement={"name": "ray", "address": "ray://HOST:10001"}), out=tmp_path / "out")


def test_a_trainer_has_time_to_answer(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"placement\.health_s"):
        rollmill.run(tiny_run(tmp_path, placement={"name": "ray", "health_s": 0.5}), out=tmp_path / "out")
