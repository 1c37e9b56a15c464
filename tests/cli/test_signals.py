"""Commands that SIGTERM and SIGHUP end: as at Ctrl-C, without temporary files that stay behind."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from support.feedback_runs import make_run
from support.forks import Forks, send
from support.picture_models import picture_checkpoint
from support.tiny import tiny_run

INTERRUPTED = 130


def ui(folder: Path) -> list[object]:
    return ["ui", make_run(folder / "run"), "--port", 0]


def feedback(folder: Path) -> list[object]:
    return ["feedback", make_run(folder / "run"), "--port", 0]


def serve(folder: Path) -> list[object]:
    return ["serve", picture_checkpoint(folder, "qwen2_5_vl"), "--port", 0]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("command", [ui, feedback, serve])
def test_a_server_ends_without_leaving_anything(
    server: Forks, tmp_path: Path, command: Callable[[Path], list[object]], number: signal.Signals
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    server.start(*command(tmp_path), folder=tmp_path, temporary=temporary)
    assert server.reaches(lambda: "(Ctrl-C ends)" in server.output())
    found = re.search(r"http://[0-9.:]+", server.output())
    assert found is not None
    httpx.get(found[0], timeout=60)
    send(server.pid, number)
    end = server.wait()
    assert (end.code, end.err) == (0, "ended\n")
    assert list(temporary.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_command_that_works_in_a_temporary_folder_removes_it(
    server: Forks, tmp_path: Path, number: signal.Signals
) -> None:
    begun = tmp_path / "begun"
    body = f"    pathlib.Path({str(begun)!r}).touch()\n    time.sleep(60)\n"
    (tmp_path / "mine.py").write_text("import pathlib, time\ndef mine(task, completion):\n" + body)
    reward = {"name": "python", "function": "mine.py:mine", "run_in": "process"}
    tiny_run(tmp_path, rewards=[reward], stages=None, steps=1, algorithm={"name": "grpo"}, evaluation=None)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    server.start("plan", "run.yaml", folder=tmp_path, temporary=temporary)
    assert server.reaches(begun.exists)
    assert any(temporary.iterdir())
    send(server.pid, number)
    end = server.wait()
    assert (end.code, end.err.splitlines()[-1]) == (INTERRUPTED, "interrupted")
    assert list(temporary.iterdir()) == []
