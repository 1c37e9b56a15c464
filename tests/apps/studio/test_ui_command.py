"""`rollmill ui` as a process: what it prints and serves, and how it ends."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from support.forks import ForkedPopen
from support.sources import PYTHONPATH
from support.ui_runs import make_run

from rollmill.cli import main


@pytest.mark.slow
def test_it_serves_until_it_is_interrupted(tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "one", 10)
    process = ForkedPopen(
        [sys.executable, "-m", "rollmill", "ui", "--port", "0"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": PYTHONPATH, "TMPDIR": str(tmp_path)},
    )
    try:
        assert process.stdout is not None
        found = re.fullmatch(r"runs in runs: (http://127\.0\.0\.1:\d+/) \(Ctrl-C ends\)\n", process.stdout.readline())
        assert found is not None
        listed = httpx.get(f"{found[1]}api/runs", timeout=60).json()["runs"]
        assert [run["id"] for run in listed] == ["one"]
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()
        process.communicate()
    assert (process.returncode, out, err) == (0, "", "ended\n")
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


def test_a_folder_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ui", str(tmp_path / "nowhere")]) == 2
    assert "is no folder; give a folder of runs, or one run" in capsys.readouterr().err


def test_a_port_that_is_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["ui", str(tmp_path), "--port", str(taken.getsockname()[1])]) == 2
    assert "give another --port (0: any)" in capsys.readouterr().err


def test_a_missing_library_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("uvicorn", "rollmill.apps.studio.ui.app"):
        monkeypatch.setitem(sys.modules, name, None)
    assert main(["ui", str(tmp_path)]) == 2
    assert "pip install 'rollmill[ui]'" in capsys.readouterr().err
