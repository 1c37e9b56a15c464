"""`rollmill serve` as a process: what it prints, serves, writes and refuses, and how it ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from support.forks import ForkedPopen
from support.sources import PYTHONPATH
from support.toys import toy_checkpoint

import rollmill
from rollmill.cli import main


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy_checkpoint(tmp_path_factory.mktemp("models") / "toy", "qwen3")


@pytest.fixture
def started() -> Iterator[list[ForkedPopen]]:
    running: list[ForkedPopen] = []
    yield running
    for process in running:
        process.kill()
        process.communicate()


def start(running: list[ForkedPopen], *arguments: object) -> tuple[ForkedPopen, str, str]:
    """A server, its address and its key."""
    words = [sys.executable, "-m", "rollmill", "serve", *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": PYTHONPATH}
    process = ForkedPopen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    running.append(process)
    assert process.stdout is not None
    printed = ""
    while (line := process.stdout.readline()) and "http" not in line:
        printed += line
    key, found = re.search(r"shown once: (\S+)", printed), re.search(r"http://\S+", line)
    assert found is not None, line + (process.stderr.read() if process.stderr else "")
    return process, found[0], "" if key is None else key[1]


@pytest.mark.slow
def test_a_checkpoint_is_served_recorded_and_ends_cleanly(
    model: Path, tmp_path: Path, started: list[ForkedPopen]
) -> None:
    process, address, key = start(started, model, "--port", 0, "--record", tmp_path / "kept", "--name", "mine")
    assert key.startswith("sk-")
    with openai.OpenAI(base_url=address, api_key=f"{key}:ann", max_retries=0) as client:
        assert client.models.list().data[0].id == "mine"
        made = client.chat.completions.create(model="", messages=[{"role": "user", "content": "hi"}], max_tokens=5)
    head = {"authorization": f"Bearer {key}"}
    body = {"completion": made.id, "reward": 0.5, "commit": True}
    assert httpx.post(address.replace("/v1", "/feedback"), json=body, headers=head).json()["committed"]
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (0, "", "ended\n")
    [one] = rollmill.load_experiences(tmp_path / "kept")
    assert (one.reward, one.task_id, one.action_tokens) == (0.5, "ann", 5)


@pytest.mark.slow
def test_variables_of_the_template_are_set_for_all_requests_without_their_own(
    tmp_path: Path, started: list[ForkedPopen]
) -> None:
    folder = toy_checkpoint(tmp_path / "toy", "qwen3")
    text = (
        "{% if enable_thinking is not defined or enable_thinking %}think{% endif %}{% for each in messages %}"
        "{{ each.role }}:{{ each.content }}<eos>{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
    )
    (folder / "chat_template.jinja").write_text(text)
    words = ("--port", 0, "--no-key", "--chat-template-kwargs", '{"enable_thinking": false}')
    _, address, _ = start(started, folder, *words)
    asked: dict[str, object] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    counts = [
        httpx.post(f"{address}/chat/completions", json=asked | more).json()["usage"]["prompt_tokens"]
        for more in ({}, {"chat_template_kwargs": {"enable_thinking": True}}, {"reasoning_effort": "low"})
    ]
    assert counts[0] < counts[1] == counts[2]


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--no-key", "--host", "0.0.0.0"], 2, "--no-key is for servers that only this machine reaches"),
        (["--no-key", "--key", "x"], 2, "excludes --key"),
        (["--chat-template-kwargs", "x"], 2, "--chat-template-kwargs: chat_template_kwargs is 'x'; give an object"),
        (["--chat-template-kwargs", '{"tools": []}'], 2, "has tools, which is set by rollmill itself"),
        (["--no-key", "--keys", "x"], 2, "excludes --key and --keys"),
        (["--key", "x", "--keys", "y"], 2, "--key and --keys exclude each other"),
        (["--keys", "none.yaml"], 2, "none.yaml: the file of API keys cannot be read"),
        (["--key", "a:b"], 2, "what follows a colon names a session"),
        (["--out", "x"], 2, "--set and --out are honoured only with --train"),
        (["--train", "--record", "x"], 2, "--record, --step, --threads and --device work only without --train"),
        (["--train", "--threads", "2"], 2, "has the keys `threads` and `device`"),
        (["--train", "--device", "cpu"], 2, "has the keys `threads` and `device`"),
        (["--step", "3"], 2, "is not a run directory, so it has no step 3"),
        (["--port", "99999"], 2, "cannot listen on 127.0.0.1 port 99999"),
    ],
)
def test_wrong_options_say_what_to_do(
    model: Path, arguments: list[str], code: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", str(model), "--port", "0", *arguments]) == code
    assert says in capsys.readouterr().err


def test_keys_come_from_one_place(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ROLLMILL_API_KEYS", "ann=sk-1")
    monkeypatch.setenv("ROLLMILL_SERVE_KEY", "sk-2")
    assert main(["serve", str(model), "--port", "0"]) == 2
    assert "ROLLMILL_API_KEYS and ROLLMILL_SERVE_KEY are both set; unset one" in capsys.readouterr().err


def test_what_holds_no_model_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", str(tmp_path / "none"), "--port", "0"]) == 1
    assert "none does not exist; give the folder of a checkpoint" in capsys.readouterr().err
    (tmp_path / "config.yaml").write_text("name: x\n")
    assert main(["serve", str(tmp_path), "--port", "0"]) == 1
    assert "has no checkpoint; it has: none" in capsys.readouterr().err
    (tmp_path / "new.yaml").write_text("model: {new: {}}\ntaskset: {function: 'a:b'}\nrewards: [{name: exact}]\n")
    assert main(["serve", str(tmp_path / "new.yaml"), "--port", "0"]) == 2
    assert "a new model is untrained" in capsys.readouterr().err
    assert main(["serve", str(tmp_path / "new.yaml"), "--port", "0", "--step", "3"]) == 2
    assert "new.yaml is not a run directory, so it has no step 3" in capsys.readouterr().err


@pytest.mark.slow
def test_several_clients_are_served_and_no_key_is_printed(
    model: Path, tmp_path: Path, started: list[ForkedPopen]
) -> None:
    (tmp_path / "keys.yaml").write_text("ann: sk-1\nbob: {key: sk-2, requests_per_minute: 1}\n")
    process, address, key = start(started, model, "--port", 0, "--keys", tmp_path / "keys.yaml")
    assert key == ""
    codes = [
        httpx.get(f"{address}/models", headers={"authorization": f"Bearer {each}"}).status_code
        for each in ("sk-1", "sk-1", "sk-2", "sk-2", "sk-3")
    ]
    assert codes == [200, 200, 200, 429, 401]
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "")
    assert "chmod 600" in err
    assert "sk-" not in err


@pytest.mark.parametrize("library", ["fastapi", "prometheus_client"])
def test_a_missing_library_is_named(
    model: Path, library: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.startswith("rollmill.apps.serve.endpoint.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)
    assert main(["serve", str(model), "--port", "0"]) == 2
    assert "pip install 'rollmill[serve]'" in capsys.readouterr().err


def test_tinker_without_its_library_is_named(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "tinker", None)
    for name in [name for name in sys.modules if name.startswith("rollmill.apps.serve.tinker.")]:
        monkeypatch.delitem(sys.modules, name)
    assert main(["serve", "--tinker", str(model), "--port", "0"]) == 2
    assert "pip install 'rollmill[tinker]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--tinker", "--step", "1"), "do not work with --tinker"),
        (("--tinker", "--record", "kept"), "do not work with --tinker"),
        (("--tinker", "--base", "name"), "--base name: expected NAME=FOLDER"),
        (("--tinker", "--key", "sk-mine"), "begin with tml-"),
        (("--base", "name=folder"), "only with --tinker"),
        (("--checkpoints", "folder"), "only with --tinker"),
        (("--precision", "fp32"), "only with --tinker"),
    ],
)
def test_options_of_tinker_have_an_effect(
    options: tuple[str, ...], reason: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", str(model), "--port", "0", *options]) == 2
    assert reason in capsys.readouterr().err
