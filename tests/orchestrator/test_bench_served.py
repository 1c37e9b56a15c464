"""`rollmill bench` with a model that is served: our own server finds what the checkpoint finds, and a hostile one costs
completions, or says what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from support.chat_server import Answer, chat_server, failing
from support.endpoints import KEY, running
from support.tiny import GRPO, HELD_OUT, tiny_run

import rollmill
from rollmill.cli import main
from rollmill.config.engines import NativeEngineConfig
from rollmill.config.model import ModelConfig
from rollmill.config.rollout import RolloutConfig
from rollmill.engines.native.build import build_native
from rollmill.models.load import load_policy

EVALUATION = {"taskset": HELD_OUT, "samples": 2}
CHAT = "\n".join(json.dumps({"prompt": f"{n}+1=", "answer": str(n + 1)}) for n in range(6))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    warm = {"name": "warm", "algorithm": {"name": "sft", "batch": 8}, "steps": 30, "trainer": {"lr": 3e-3}}
    rewards = [{"name": "exact", "after": "#"}, {"name": "format", "pattern": "1.*[0-4]"}]
    path = tiny_run(folder, evaluation=EVALUATION, stages=[warm, GRPO | {"steps": 1}], rewards=rewards)
    rollmill.run(path, [], folder / "run")
    return folder / "run"


def described(folder: Path, url: str, **keys: Any) -> Path:
    path = folder / "theirs.yaml"
    path.write_text(yaml.safe_dump({"endpoint": url, "model": "toy", **keys}))
    return path


def settings(folder: Path, **sections: Any) -> Path:
    (folder / "tasks.jsonl").write_text(CHAT)
    evaluation = {"taskset": {"path": str(folder / "tasks.jsonl")}, "samples": 2}
    content = {"rewards": [{"name": "exact"}], "evaluation": evaluation, "rollout": {"max_new_tokens": 8}, **sections}
    path = folder / "eval.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def values(capsys: pytest.CaptureFixture[str], *argv: object) -> dict[tuple[str, str], float]:
    assert main(["bench", *map(str, argv), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["results"]
    return {(each["subject"], each["measure"]): each["value"] for each in found}


@pytest.mark.slow
def test_our_own_server_says_what_the_checkpoint_says(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVED_KEY", KEY)
    [checkpoint] = (run / "checkpoints").glob("step-000031")
    policy = load_policy(ModelConfig(path=checkpoint), texts=[], seed=0, device=torch.device("cpu"))
    engine = build_native(NativeEngineConfig(), policy, RolloutConfig(), "fp32")
    out = tmp_path / "out"
    with running(made=(engine, policy.tokenizer), sink=False) as server:
        file = described(tmp_path, server.base_url, completes=True, api_key_env="SERVED_KEY")
        values(capsys, run, file, "--out", out)
    cells = {path.parent.name.rsplit("-", 1)[0]: json.loads(path.read_text()) for path in out.rglob("held-out.json")}
    ours, theirs = cells["run@31"]["tasks"], cells["theirs"]["tasks"]
    assert len(ours) == 6
    assert len({reward for task in ours for reward in task["rewards"]}) > 1
    assert [task["greedy"] for task in theirs] == [task["greedy"] for task in ours]
    assert [task["greedy_tokens"] for task in theirs] == [task["greedy_tokens"] for task in ours]
    assert KEY not in "".join(path.read_text() for path in out.rglob("*") if path.is_file())
    page = values(capsys, run, file, "--out", out)  # nobody is asked again: the server is gone
    assert ("theirs", "greedy") in page


@pytest.mark.slow
def test_a_hostile_server_is_asked_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tried: dict[str, int] = {}
    ways = [
        failing(429, "slow down", **{"Retry-After": "0"}),
        Answer(drop=True),
        Answer(body=b"<html>"),
        Answer(body=7),
    ]

    def script(body: dict[str, Any]) -> Answer | str:
        [message] = body["messages"]
        key = f"{message['content']} {body['seed']} {body['temperature']}"
        tried[key] = tried.get(key, 0) + 1
        if tried[key] == 1:
            return ways[len(tried) % len(ways)]
        return str(int(message["content"].partition("+")[0]) + 1)

    with chat_server(script) as server:
        config = settings(tmp_path, rollout={"max_new_tokens": 8, "top_p": 0.9, "stop": ["\n"]})
        found = values(capsys, described(tmp_path, server.url), "--config", config, "--out", tmp_path / "out")
    assert found == {("theirs", "greedy"): 1.0, ("theirs", "sampled"): 1.0}
    assert len(tried) == 6 * 3
    assert set(tried.values()) == {2}
    sampled = [body for body in server.requests if body["temperature"] == 1]
    assert all((body["top_p"], body["stop"], body["max_tokens"]) == (0.9, ["\n"], 8) for body in sampled)
    assert all("top_p" not in body for body in server.requests if body["temperature"] == 0)


def test_what_is_never_answered_earns_nothing_and_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def script(body: dict[str, Any]) -> Answer | str:
        text = body["messages"][0]["content"]
        if not text[0].isdigit():
            return "yes"  # to a probe
        return failing(400, "not this one", "content_filter") if text == "3+1=" else str(int(text[0]) + 1)

    with chat_server(script) as server:
        argv = [described(tmp_path, server.url), "--config", settings(tmp_path), "--out", tmp_path / "out"]
        assert main(["bench", *map(str, argv), "--json"]) == 0
    told = capsys.readouterr()
    assert [each["value"] for each in json.loads(told.out)["results"]] == pytest.approx([5 / 6] * 2)
    assert "theirs: 3 completions never came and earned nothing; task" in told.err
    assert "not this one" in told.err


@pytest.mark.parametrize(
    ("answer", "keys", "says"),
    [
        (failing(503, "busy"), {"tries": 1}, "status 503 (busy); gave up after 1 tries; is the server up"),
        (Answer("x", delay_s=5.0), {"try_s": 0.2, "deadline_s": 0.3}, "no answer in 0 s"),
        (failing(401, "who?"), {}, "the key is refused; name the key's variable: api_key_env"),
        (failing(404, "no such model"), {}, "correct `model`, or `endpoint`, which mostly ends in /v1"),
    ],
)
def test_a_server_of_no_use_ends_the_bench(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], answer: Answer, keys: dict[str, Any], says: str
) -> None:
    with chat_server([answer]) as server:
        argv = [described(tmp_path, server.url, **keys), "--config", settings(tmp_path), "--out", tmp_path / "out"]
        assert main(["bench", *map(str, argv)]) == 1
    told = capsys.readouterr().err
    assert says in told
    assert "theirs.yaml: the model toy at http://" in told


@pytest.mark.parametrize(
    ("keys", "sections", "says"),
    [
        ({"temperature": 0.5}, {}, "theirs.yaml:3: temperature: not honoured in the file of a served model"),
        ({"endpoint": None}, {}, "theirs.yaml: endpoint: is missing; give the base URL of an OpenAI-compatible server"),
        ({"endpiont": "x"}, {}, "theirs.yaml:1: endpiont: unknown key; did you mean `endpoint`?"),
        ({"api_key_env": "NOT_SET_HERE"}, {}, "the environment variable NOT_SET_HERE (api_key_env) is not set"),
        ({}, {"workflow": "reflection"}, "is asked by `single_turn` alone"),
        (
            {},
            {"rollout": {"stop_token_ids": [3]}},
            "theirs.yaml: stop_token_ids: the numbers of another",
        ),
    ],
)
def test_what_cannot_be_asked_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], keys: dict[str, Any], sections: dict[str, Any], says: str
) -> None:
    file = described(tmp_path, "http://127.0.0.1:9/v1", **keys)
    argv = [file, "--config", settings(tmp_path, **sections), "--out", tmp_path / "out"]
    assert main(["bench", *map(str, argv)]) == 2
    assert says in capsys.readouterr().err


def test_checkpoints_are_chosen_of_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = described(tmp_path, "http://127.0.0.1:9/v1")
    argv = [file, "--config", settings(tmp_path), "--out", tmp_path / "out", "--step", "all"]
    assert main(["bench", *map(str, argv)]) == 2
    assert "--step all chooses among the checkpoints of run directories" in capsys.readouterr().err
