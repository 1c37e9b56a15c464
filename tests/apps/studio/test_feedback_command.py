"""`rollmill feedback` as a process: what it prints, serves, exports and imports, and how it ends."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from support.feedback_runs import everything, make_run
from support.forks import ForkedPopen
from support.sources import PYTHONPATH

from rollmill.apps.studio.feedback import open_feedback
from rollmill.cli import main


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return make_run(tmp_path / "apples")


@pytest.fixture
def started() -> Iterator[list[ForkedPopen]]:
    running: list[ForkedPopen] = []
    yield running
    for process in running:
        process.kill()
        process.communicate()


def start(running: list[ForkedPopen], *arguments: object) -> tuple[ForkedPopen, str]:
    """A server, and the address it prints."""
    words = [sys.executable, "-m", "rollmill", "feedback", *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": PYTHONPATH}
    process = ForkedPopen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    running.append(process)
    assert process.stdout is not None
    line = process.stdout.readline()
    found = re.search(r"http://\S+", line)
    assert found is not None, line + (process.stderr.read() if process.stderr else "")
    return process, found[0]


@pytest.mark.slow
def test_it_serves_until_it_is_interrupted(run_dir: Path, started: list[ForkedPopen]) -> None:
    process, address = start(started, run_dir, "--port", 0, "--author", "ann")
    with httpx.Client(base_url=address, timeout=60) as client:
        assert 'value="ann"' in client.get("/", headers={"accept": "text/html"}).text
        row = {"author": "env", "completion": "main-000005/1", "rating": 1.0}
        assert client.post("/feedback", json=row).json()["new"] == 1
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (0, "", "ended\n")
    assert len(everything(open_feedback(run_dir))["rated"]) == 1


@pytest.mark.slow
def test_what_was_answered_survives_a_kill(run_dir: Path, started: list[ForkedPopen]) -> None:
    process, address = start(started, run_dir, "--port", 0)
    ids = []
    with httpx.Client(base_url=address, timeout=60) as client:
        for number in range(5):
            row = {"author": "env", "prompt": f"{number}+1=", "response": str(number + 1)}
            ids += client.post("/feedback", json=row).json()["ids"]
    process.kill()
    process.communicate()
    assert [group.id for group in everything(open_feedback(run_dir))["expert"]] == ids


@pytest.mark.slow
def test_other_addresses_get_a_warning_and_a_token(run_dir: Path, started: list[ForkedPopen]) -> None:
    process, address = start(started, run_dir, "--port", 0, "--host", "0.0.0.0")
    base, _, token = address.replace(socket.gethostname(), "127.0.0.1").partition("?token=")
    assert len(token) > 20
    assert httpx.get(base).status_code == 401
    assert httpx.get(base + "health", headers={"authorization": f"Bearer {token}"}).status_code == 200
    process.send_signal(signal.SIGINT)
    assert "other machines can reach 0.0.0.0" in process.communicate(timeout=30)[1]


def test_label_studio_there_and_back(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tasks = tmp_path / "tasks.json"
    assert main(["feedback", str(run_dir), "--export-label-studio", str(tasks), "--step", "1", "--step", "2"]) == 0
    assert f"wrote 16 tasks to {tasks}, the labelling configuration to {tmp_path}/tasks.xml" in capsys.readouterr().out
    [first, *_] = json.loads(tasks.read_text())
    result = [{"from_name": "rating", "to_name": "response", "type": "rating", "value": {"rating": 5}}]
    annotation = {"id": 1, "completed_by": 1, "result": result, "created_at": "2026-01-02T03:04:05Z"}
    tasks.write_text(json.dumps([first | {"annotations": [annotation]}]))
    for said in ("1 new, 0 known before", "0 new, 1 known before"):
        assert main(["feedback", str(run_dir), "--import-label-studio", str(tasks)]) == 0
        assert said in capsys.readouterr().out
    assert main(["feedback", str(run_dir), "--export-label-studio", str(tasks), "--pairs"]) == 0
    assert "wrote 4 tasks" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--pairs"], 2, "--pairs and --step are honoured only with --export-label-studio"),
        (["--export-label-studio", "a", "--author", "ann"], 2, "honoured only when the page is served"),
        (["--import-label-studio", "a", "--keys", "b"], 2, "honoured only when the page is served"),
        (["--keys", "nothing.yaml"], 2, "nothing.yaml: the file of API keys cannot be read"),
        (["--import-label-studio", "a", "--port", "1"], 2, "honoured only when the page is served"),
        (["--export-label-studio", "a", "--import-label-studio", "b"], 2, "exclude each other"),
        (["--import-label-studio", "nothing.json"], 2, "nothing.json: no such file"),
        (["--export-label-studio", "a.json", "--step", "9"], 1, "stores no completions of step 9"),
        (["--author", "a\nb"], 1, "author: a name of visible characters"),
        (["--host", "256.0.0.1", "--port", "0"], 2, "cannot listen on 256.0.0.1 port 0"),
        (["--port", "70000"], 2, "cannot listen on 127.0.0.1 port 70000"),
    ],
)
def test_wrong_options(
    run_dir: Path, arguments: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["feedback", str(run_dir), *arguments]) == code
    assert said in capsys.readouterr().err


def test_a_token_that_no_address_can_hold(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ROLLMILL_FEEDBACK_TOKEN", "a&b")
    assert main(["feedback", str(run_dir)]) == 2
    assert "ROLLMILL_FEEDBACK_TOKEN is part of an address" in capsys.readouterr().err


def test_a_token_and_keys_exclude_each_other(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ROLLMILL_FEEDBACK_TOKEN", "a")
    monkeypatch.setenv("ROLLMILL_API_KEYS", "ann=sk-1")
    assert main(["feedback", str(run_dir)]) == 2
    assert "the keys of clients exclude each other" in capsys.readouterr().err


@pytest.mark.slow
def test_each_person_opens_the_page_with_their_own_key(
    run_dir: Path, tmp_path: Path, started: list[ForkedPopen]
) -> None:
    (tmp_path / "keys.yaml").write_text("zoe: sk-1\nshop: sk-2\n")
    _, address = start(started, run_dir, "--port", 0, "--keys", tmp_path / "keys.yaml")
    assert address.endswith("/?token=KEY")
    with httpx.Client(follow_redirects=True) as client:
        assert 'value="zoe"' in client.get(address.replace("KEY", "sk-1"), headers={"accept": "text/html"}).text
    assert httpx.get(address).status_code == 401


def test_a_port_in_use(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["feedback", str(run_dir), "--port", str(taken.getsockname()[1])]) == 2
    assert "give another --port (0: any)" in capsys.readouterr().err


def test_a_missing_library_is_named(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert main(["feedback", str(run_dir)]) == 2
    assert "pip install 'rollmill[feedback]'" in capsys.readouterr().err


def test_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["feedback", str(tmp_path)]) == 2
    assert "holds no run" in capsys.readouterr().err
