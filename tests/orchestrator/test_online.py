"""An application's live requests and feedback train the model behind it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from statistics import mean
from typing import Any

import httpx
import openai
import pytest
import schemathesis
import yaml
from support.forks import Forks, send
from support.fuzzing import fuzz
from support.tiny import trainer as trainer_of
from support.toys import toy_checkpoint

from rollmill import load_experiences
from rollmill.apps.serve.endpoint import session_journal
from rollmill.apps.serve.endpoint.middleware import AccessRules
from rollmill.apps.serve.endpoint.service import ServiceLimits
from rollmill.apps.serve.endpoint.session_journal import SESSIONS_FILE, SessionJournal
from rollmill.apps.serve.serving import ServerAddress, serve_training
from rollmill.apps.serve.web import open_listener
from rollmill.apps.serve.web.keys import KeyRing, make_key
from rollmill.config.loader import load_run
from rollmill.errors import ConfigError, CorruptFileError
from rollmill.launch import resume, run
from rollmill.orchestrator.batches import RolloutBatches
from rollmill.orchestrator.live_requests import LiveRequestBatches
from rollmill.trackers.metrics_log import read_metrics
from rollmill.trainer import Trainer

KEY, OTHER_KEY = "sk-online", "sk-other"
KEYS = KeyRing([make_key("owner", KEY), make_key("other", OTHER_KEY)])
RUN: dict[str, Any] = {
    "name": "online",
    "steps": 8,
    "max_staleness": 4,
    "model": {"path": "model"},
    "workflow": "live_requests",
    "rollout": {"batch": 16, "max_new_tokens": 4},
    "algorithm": {"name": "reinforce_plus_plus"},
    "trainer": {"lr": 3e-3, "precision": "fp32"},
    "checkpoint": {"every": 2},
}


def run_file(folder: Path, **changes: Any) -> Path:
    """A run file whose model is a random one."""
    if not (folder / "model").exists():
        toy_checkpoint(folder / "model", "qwen3")
    (folder / "run.yaml").write_text(yaml.safe_dump(RUN | changes))
    return folder / "run.yaml"


def train(source: Path, application: Callable[[str], None], out: Path | None = None) -> dict[str, Any]:
    """Serve and train while the application runs in a thread; the summary."""
    listener = open_listener("127.0.0.1", 0)
    address = f"http://127.0.0.1:{listener.getsockname()[1]}"
    failures: list[BaseException] = []

    def apply() -> None:
        try:
            application(address)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=apply)
    place = ServerAddress(listener, AccessRules("127.0.0.1", KEYS), ServiceLimits(), "toy", thread.start)
    summary = serve_training(source, place, out=out)
    thread.join()
    if failures:
        raise failures[0]
    return summary


def talk(
    address: str, session: str, rewarded: Callable[[str], float], between: Callable[[], None] = lambda: None
) -> list[str]:
    """A conversation of two turns, with a call between them, rewarded and committed; what was answered."""
    said: list[str] = []
    messages: list[Any] = []
    with openai.OpenAI(base_url=f"{address}/v1", api_key=f"{KEY}:{session}", max_retries=0) as client:
        for question in ("how many apples?", "and now?"):
            if said:
                between()
            messages.append({"role": "user", "content": question})
            reply = client.chat.completions.create(model="toy", messages=messages).choices[0].message
            messages.append({"role": "assistant", "content": reply.content})
            said.append(reply.content or "")
    body = {"session": session, "reward": rewarded("".join(said)), "commit": True}
    answer = httpx.post(f"{address}/feedback", json=body, headers={"authorization": f"Bearer {KEY}"})
    assert answer.status_code == 200, answer.text
    return said


class Application:
    """Users in threads that talk until the server takes no more."""

    def __init__(self, users: int, rewarded: Callable[[str], float]) -> None:
        self.users, self.rewarded = users, rewarded
        self.failed: list[Exception] = []
        self.answered = 0

    def __call__(self, address: str) -> None:
        threads = [threading.Thread(target=self._user, args=(address, number)) for number in range(self.users)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()

    def _user(self, address: str, number: int) -> None:
        for turn in range(10_000):
            try:
                talk(address, f"user-{number}-{turn}", self.rewarded)
                self.answered += 1
            except (openai.APIConnectionError, httpx.TransportError):
                return  # the server has ended
            except openai.InternalServerError as error:
                if error.status_code != 503:
                    self.failed.append(error)
                return
            except Exception as error:
                self.failed.append(error)
                return


def letters(text: str) -> float:
    """The share of letters and spaces."""
    return mean([each.isascii() and (each.isalpha() or each == " ") for each in text] or [False])


@pytest.mark.thorough
@pytest.mark.slow
def test_reward_rises_from_feedback_and_no_request_is_dropped(tmp_path: Path) -> None:
    application = Application(12, letters)
    summary = train(run_file(tmp_path, steps=14), application, tmp_path / "out")
    assert not application.failed
    assert summary["steps"] == 14
    rewards = [json.loads(line)["reward/mean"] for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    assert mean(rewards[-4:]) > mean(rewards[:4]) + 0.15
    experiences = load_experiences(tmp_path / "out")
    assert len({each.id for each in experiences}) == len(experiences) >= 14 * 16


def conversation_of(address: str, session: str, reward: float) -> None:
    talk(address, session, lambda _: reward)


@pytest.mark.slow
def test_under_attack_only_the_owners_sessions_are_learned_from(tmp_path: Path) -> None:
    """Attackers without a key, with a wrong one, and with a key of another client who knows every name and id."""
    sessions = {f"s{number}": number / 10 for number in range(8)}
    foreign: list[int] = []
    outsiders: dict[int, int] = {}

    def attack(address: str, name: str, answer: str) -> None:
        head = {"authorization": f"Bearer {OTHER_KEY}"}
        for path, body in (
            ("/feedback", {"session": name, "reward": 9.0, "commit": True}),
            ("/feedback", {"completion": answer, "reward": {"feedback": 9.0}, "commit": True}),
            ("/commit", {"sessions": [name]}),
            (f"/s/{name}/commit", {}),
        ):
            foreign.append(httpx.post(address + path, json=body, headers=head).status_code)
        assert httpx.post(f"{address}/commit", json={}, headers=head).json()["committed"] == []

    def application(address: str) -> None:
        schema = schemathesis.openapi.from_url(f"{address}/openapi.json", headers={"authorization": f"Bearer {KEY}"})
        for session, reward in sessions.items():
            head = {"authorization": f"Bearer {KEY}"}
            body = {"messages": [{"role": "user", "content": "how many apples?"}]}
            made = httpx.post(
                f"{address}/v1/chat/completions", json=body, headers=head | {"x-session-id": session}, timeout=60
            )
            attack(address, session, made.json()["id"])
            if session == "s1":
                for wrong in ("sk-guess", ""):
                    found = fuzz(
                        schema,
                        address,
                        {"authorization": f"Bearer {wrong}"},
                        4,
                        secrets=[KEY, OTHER_KEY, made.json()["id"]],
                    )
                    outsiders.update(found)
                fuzz(schema, address, {"authorization": f"Bearer {OTHER_KEY}"}, 4, secrets=[KEY, OTHER_KEY, 's0"'])
            body = {"session": session, "reward": reward, "commit": True}
            assert httpx.post(f"{address}/feedback", json=body, headers=head).status_code == 200

    source = run_file(tmp_path, steps=4, rollout={"batch": 2, "max_new_tokens": 4})
    summary = train(source, application, tmp_path / "out")
    assert (summary["status"], summary["steps"]) == ("done", 4)
    assert set(foreign) == {404}
    assert set(outsiders) <= {200, 401, 405}  # 200: /health
    learned = {one.info["session"]: one.reward for one in load_experiences(tmp_path / "out")}
    assert learned == sessions
    assert {one.info["client"] for one in load_experiences(tmp_path / "out")} == {"owner"}


def test_requests_are_taken_while_the_trainer_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    learning, go_on = threading.Event(), threading.Event()
    step = Trainer.step

    def slow(self: Trainer, *args: Any) -> dict[str, float]:
        learning.set()
        assert go_on.wait(60)
        return step(self, *args)

    monkeypatch.setattr(Trainer, "step", slow)
    answers: list[Any] = []

    def application(address: str) -> None:
        conversation_of(address, "a", 0.0)
        conversation_of(address, "b", 1.0)
        assert learning.wait(60)
        client = openai.OpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0)
        messages: list[Any] = [{"role": "user", "content": "hi"}]
        asking = threading.Thread(
            target=lambda: answers.append(client.chat.completions.create(model="", messages=messages))
        )
        asking.start()
        while httpx.get(f"{address}/health").json()["under_way"] == 0:
            pass
        assert httpx.get(f"{address}/health").json()["weights_version"] == 0
        go_on.set()
        asking.join()

    rollout = {"batch": 2, "max_new_tokens": 4}
    summary = train(run_file(tmp_path, steps=1, rollout=rollout), application, tmp_path / "out")
    assert answers[0].choices[0].message.content
    assert summary["steps"] == 1
    assert {one.info["session"] for one in load_experiences(tmp_path / "out")} == {"a", "b"}


def test_a_conversation_goes_on_with_newer_weights(tmp_path: Path) -> None:
    def application(address: str) -> None:
        def a_step() -> None:
            for number in range(2):
                conversation_of(address, f"other-{number}", float(number))
            while httpx.get(f"{address}/health").json()["weights_version"] == 0:
                time.sleep(0.01)

        talk(address, "across", lambda _: 1.0, a_step)
        conversation_of(address, "last", 0.0)

    rollout = {"batch": 2, "max_new_tokens": 4}
    train(run_file(tmp_path, steps=2, rollout=rollout), application, tmp_path / "out")
    versions = {
        each.info["session"]: set(each.versions[each.action_mask].tolist())
        for each in load_experiences(tmp_path / "out")
    }
    assert versions == {"other-0": {0}, "other-1": {0}, "across": {0, 1}, "last": {1}}


def test_sessions_that_began_alike_are_compared(tmp_path: Path) -> None:
    codes: list[int] = []

    def application(address: str) -> None:
        with openai.OpenAI(base_url=f"{address}/v1", api_key=f"{KEY}:idle", max_retries=0) as client:
            client.chat.completions.create(model="", messages=[{"role": "user", "content": "x"}])
        head = {"authorization": f"Bearer {KEY}"}
        codes.append(httpx.post(f"{address}/commit", json={"session": "idle"}, headers=head).status_code)
        for number in range(4):
            conversation_of(address, f"s{number}", float(number))

    changes: dict[str, Any] = {
        "steps": 1,
        "rollout": {"batch": 1, "group_size": 4, "max_new_tokens": 4},
        "workflow": {"name": "live_requests", "group": "prompt"},
        "algorithm": {"name": "grpo"},
    }
    train(run_file(tmp_path, **changes), application, tmp_path / "out")
    experiences = load_experiences(tmp_path / "out")
    assert [one.reward for one in experiences] == [0.0, 1.0, 2.0, 3.0]
    assert len({one.group for one in experiences}) == 1
    assert codes == [409], "a session without a reward cannot be learned from"


@pytest.mark.slow
def test_ctrl_c_ends_with_a_checkpoint_that_goes_on(tmp_path: Path) -> None:
    def application(address: str) -> None:
        for number in range(5):
            conversation_of(address, f"s{number}", float(number))
        while httpx.get(f"{address}/health").json()["weights_version"] < 2:
            pass
        os.kill(os.getpid(), signal.SIGINT)

    source = run_file(tmp_path, steps=4, rollout={"batch": 2, "max_new_tokens": 4})
    with pytest.raises(KeyboardInterrupt):
        train(source, application, tmp_path / "out")
    assert json.loads((tmp_path / "out/summary.json").read_text())["status"] == "interrupted"

    def more(address: str) -> None:
        for number in range(5, 8):  # the fifth session is still there
            conversation_of(address, f"s{number}", float(number))

    summary = train(tmp_path / "out", more)
    assert (summary["status"], summary["steps"]) == ("done", 4)
    learned = [one.info["session"] for one in load_experiences(tmp_path / "out")]
    assert sorted(learned) == [f"s{number}" for number in range(8)]


def test_names_of_open_sessions_outlive_their_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / SESSIONS_FILE
    monkeypatch.setattr(session_journal, "_SPARE_LINES", 3)  # the file is replaced now and then
    first = SessionJournal(path)
    for name in ("a", "b", "c", "d"):
        first.opened(("x", name))
    for key in (("x", "a"), ("y", "b"), ("x", "d")):
        first.closed(key)
    with path.open("a") as file:
        file.write('["opened", "x')  # the process was killed
    second = SessionJournal(path)
    assert second.lost == {("x", "b"), ("x", "c")}
    assert not second.was_lost(("x", "a"))
    assert [second.was_lost(("x", "b")), second.was_lost(("x", "b"))] == [True, False]
    second.opened(("x", "b"))
    assert SessionJournal(path).lost == {("x", "b"), ("x", "c")}
    path.write_text('["opened"\n["opened", "x", "a"]\n')
    with pytest.raises(CorruptFileError, match=r"sessions\.jsonl:1 is damaged"):
        SessionJournal(path)


@pytest.mark.slow
def test_a_server_whose_process_dies_starts_again_and_tells_who_had_a_session_open(
    server: Forks, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    run_file(tmp_path, steps=2, rollout={"batch": 2, "max_new_tokens": 4}, supervise={"backoff_s": 0.0})
    options = ("--port", "0", "--key", KEY, "--out", "out")
    server.start("serve", "run.yaml", "--train", *options, folder=tmp_path)
    assert server.reaches(lambda: (out / SESSIONS_FILE).exists() and "serving run.yaml" in server.output())
    [address] = re.findall(r"http://[0-9.:]+", server.output())

    def ask(session: str) -> httpx.Response:
        head = {"authorization": f"Bearer {KEY}", "x-session-id": session}
        body = {"messages": [{"role": "user", "content": "hi"}]}
        return httpx.post(f"{address}/v1/chat/completions", json=body, headers=head, timeout=60)

    conversation_of(address, "first", 1.0)
    conversation_of(address, "second", 0.0)
    assert ask("open").status_code == 200
    assert server.reaches(lambda: (out / "checkpoints/step-000001").is_dir() or len(read_metrics(out)) >= 1)
    send(trainer_of(out), signal.SIGKILL)
    lost = ask("open")  # waits for the next process
    assert (lost.status_code, lost.json()["error"]["code"]) == (410, "session_lost")
    head = {"authorization": f"Bearer {KEY}"}
    forgotten = httpx.post(f"{address}/commit", json={"session": "open"}, headers=head)
    assert forgotten.status_code == 404
    assert ask("open").status_code == 200, "the name may be used again"
    for number in range(4):
        with suppress(openai.APIConnectionError, openai.APIStatusError, httpx.TransportError, AssertionError):
            conversation_of(address, f"later-{number}", float(number))  # until the run is done
    end = server.wait()
    assert end.code == 0, end.err
    assert "restart 1 of 3" in end.out
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["status"], summary["steps"], summary["restarts"]) == ("done", 2, 1)


def test_sessions_that_wait_for_others_are_still_there_when_the_run_goes_on(tmp_path: Path) -> None:
    def application(address: str) -> None:
        conversation_of(address, "first", 1.0)
        os.kill(os.getpid(), signal.SIGINT)

    changes: dict[str, Any] = {
        "steps": 1,
        "rollout": {"batch": 1, "group_size": 2, "max_new_tokens": 4},
        "workflow": {"name": "live_requests", "group": "prompt"},
        "algorithm": {"name": "grpo"},
    }
    with pytest.raises(KeyboardInterrupt):
        train(run_file(tmp_path, **changes), application, tmp_path / "out")
    train(tmp_path / "out", lambda address: conversation_of(address, "second", 0.0))
    experiences = load_experiences(tmp_path / "out")
    assert [(one.info["session"], one.reward) for one in experiences] == [("first", 1.0), ("second", 0.0)]
    assert len({one.group for one in experiences}) == 1


def test_a_session_is_written_down_before_its_commit_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that dies while the pipeline works has lost nothing."""
    verify = LiveRequestBatches._process_group

    async def never(self: LiveRequestBatches, *args: Any) -> bool:
        await asyncio.Event().wait()
        raise AssertionError

    async def stop(self: LiveRequestBatches) -> None:
        for each in self._coming:
            each.cancel()
        await asyncio.gather(*self._coming, return_exceptions=True)
        await RolloutBatches.close(self)

    monkeypatch.setattr(LiveRequestBatches, "_process_group", never)
    monkeypatch.setattr(LiveRequestBatches, "close", stop)

    def application(address: str) -> None:
        conversation_of(address, "a", 1.0)
        conversation_of(address, "b", 0.0)
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(run_file(tmp_path, steps=1, rollout={"batch": 2, "max_new_tokens": 4}), application, tmp_path / "out")
    monkeypatch.undo()
    assert LiveRequestBatches._process_group is verify
    train(tmp_path / "out", lambda address: None)
    assert sorted(one.info["session"] for one in load_experiences(tmp_path / "out")) == ["a", "b"]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"algorithm": {"name": "grpo"}},
            "each session is a group of its own; use algorithm reinforce_plus_plus, reinforce or ppo",
        ),
        ({"algorithm": {"name": "remax"}}, "compares with a greedy completion, which no application makes"),
        ({"buffer": {"store": "memory"}}, "would be lost with the process; use `sql`"),
        ({"max_staleness": 0}, "max_staleness: conversations go on while weights change"),
        ({"rewards": [{"name": "math"}]}, "rewards: not honoured by workflow `live_requests`"),
        ({"rollout": {"group_size": 2}}, "group_size: not honoured with workflow.group `session`"),
        ({"rollout": {"oversample": 0.5}}, "oversample: not honoured by workflow `live_requests`"),
        ({"rollout": {"token_budget": 9}}, "token_budget: not honoured by workflow `live_requests`"),
        ({"taskset": {"function": "a:b"}}, "taskset: not honoured by workflow `live_requests`"),
    ],
)
def test_what_cannot_learn_from_live_requests_is_said(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_run(run_file(tmp_path, **changes), require_files=False)


def test_only_serve_waits_for_applications(tmp_path: Path) -> None:
    source = run_file(tmp_path)
    with pytest.raises(ConfigError, match=r"rollmill serve .*run.yaml --train"):
        run(source, out=tmp_path / "out")
    with pytest.raises(ConfigError, match=r"rollmill serve .*out --train"):
        resume(tmp_path / "out")
    source.write_text(
        yaml.safe_dump({**RUN, "workflow": "single_turn", "max_staleness": 0, "rewards": [{"name": "math"}]})
    )
    listener = open_listener("127.0.0.1", 0)
    place = ServerAddress(listener, AccessRules("127.0.0.1", KEYS), ServiceLimits(), "toy", lambda: None)
    with pytest.raises(ConfigError):
        serve_training(source, place)
    listener.close()
