"""`rollmill run` in the modes that train nothing here: bench, serve, explore."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import torch
from support.forks import ForkedPopen
from support.sources import PYTHONPATH
from support.tiny import tiny_run
from support.toys import toy_checkpoint

import rollmill
from rollmill.apps.serve import command as serve
from rollmill.apps.serve import web as hosts
from rollmill.cli import main
from rollmill.errors import ConfigError

RL = {"stages": None, "steps": 1, "algorithm": {"name": "grpo"}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy_checkpoint(tmp_path_factory.mktemp("models") / "toy", "qwen3")


def test_bench_measures_the_run_files_model(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    tiny_run(tmp_path, **RL, model={"path": str(model), "new": None}, rollout={"max_new_tokens": 4})
    assert main(["run", "run.yaml", "--set", "mode=bench", "--json"]) == 0
    ours = json.loads(capsys.readouterr().out)
    assert main(["bench", str(model), "--config", "run.yaml", "--out", "other", "--json"]) == 0
    assert ours == json.loads(capsys.readouterr().out)
    assert Path("bench-results/bench.html").is_file()
    assert main(["run", "run.yaml", "--set", "mode=bench", "--set", "evaluation.samples=2", "--out", "more"]) == 0
    assert Path("more/results.json").is_file()


@pytest.mark.slow
def test_serve_serves_the_run_files_model(model: Path, tmp_path: Path) -> None:
    with httpx.Client() as client:
        try:
            client.get(f"http://{serve.HOST}:{serve.PORT}")
            pytest.skip(f"something listens on port {serve.PORT}, the default")
        except httpx.TransportError:
            pass
    tiny_run(tmp_path, **RL, model={"path": str(model), "new": None})
    words = [sys.executable, "-m", "rollmill", "run", "run.yaml", "--set", "mode=serve"]
    environment = os.environ | {"PYTHONPATH": PYTHONPATH}
    pipe = subprocess.PIPE
    process = ForkedPopen(words, cwd=tmp_path, stdout=pipe, stderr=pipe, text=True, env=environment)
    try:
        assert process.stdout is not None
        key = re.search(r"shown once: (\S+)", process.stdout.readline())
        address = re.search(r"http://\S+", process.stdout.readline())
        assert key is not None
        assert address is not None
        listed = httpx.get(f"{address[0]}/models", headers={"authorization": f"Bearer {key[1]}"}).json()
        assert [each["id"] for each in listed["data"]] == ["toy"]
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("mode", "more", "says"),
    [
        ("serve", ("--out", "x"), "mode `serve` writes no run directory"),
        ("serve", ("--json",), "--json: mode `serve` prints no result"),
        ("explore", ("--set", "trainer_away_s=0.6", "--out", "x"), "the explorer waited 1 s for the trainer"),
    ],
)
def test_what_cannot_begin(
    model: Path,
    tmp_path: Path,
    mode: str,
    more: tuple[str, ...],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    tiny_run(tmp_path, **RL, model={"path": str(model), "new": None})
    assert main(["run", "run.yaml", "--set", f"mode={mode}", *more]) in (1, 2)
    assert says in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_serve_honours_the_device(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    listen = hosts.open_listener
    monkeypatch.setattr(hosts, "open_listener", lambda host, port: listen(host, 0))
    tiny_run(tmp_path, **RL, model={"path": str(model), "new": None}, device="cuda")
    assert main(["run", "run.yaml", "--set", "mode=serve"]) == 2
    assert "device: cuda, but torch finds no CUDA device" in capsys.readouterr().err


def test_from_python_only_what_trains(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="mode `explore` is for the command `rollmill run`"):
        rollmill.run(tiny_run(tmp_path, **RL, mode="explore"))
