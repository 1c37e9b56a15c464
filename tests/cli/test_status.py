"""`rollmill status`."""

from __future__ import annotations

import io
import json
import os
import signal
import time
from pathlib import Path

import pytest
from support.tiny import tiny_run

from rollmill.cli import main
from rollmill.cli.status import duration
from rollmill.errors import RollmillError
from rollmill.launch import run
from rollmill.trackers import heartbeat
from rollmill.trackers.heartbeat import HeartbeatWriter
from rollmill.trackers.run_views import PlainView
from rollmill.waiting import OUTAGES

SHORT = {"stages": None, "algorithm": {"name": "grpo"}, "steps": 2, "evaluation": {"every": 1}}


def test_a_run_says_what_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said: list[tuple[str, str]] = []
    says = HeartbeatWriter.set_activity

    def noted(self: HeartbeatWriter, doing: str, waits_for: str = "", *, version: int | None = None) -> None:
        said.append((doing, waits_for))
        says(self, doing, waits_for, version=version)

    monkeypatch.setattr(heartbeat.HeartbeatWriter, "set_activity", noted)
    out = tmp_path / "out"
    run(tiny_run(tmp_path, **SHORT), out=out, view=PlainView(io.StringIO()))
    assert ("roll out, step 1 of 2, stage train", "the engine to finish its completions") in said
    assert ("reward, step 2 of 2, stage train", "rewards of 4 groups") in said
    assert ("train, step 2 of 2, stage train", "") in said
    assert ("write the checkpoint of step 2", "") in said
    assert any(doing.startswith("evaluate, after step 1") for doing, _ in said)

    capsys.readouterr()
    assert main(["status", str(out)]) == 0
    printed = capsys.readouterr().out
    assert f"run {out}: done" in printed
    assert "stage train, step 2 of 2" in printed
    assert main(["status", str(out), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (trainer,) = found["processes"]
    assert (found["state"], found["total"], trainer["name"], trainer["pid"]) == ("done", 2, "trainer", os.getpid())
    assert (trainer["state"], trainer["ended"], trainer["waits_for"]) == ("ended", "done", "")


def test_a_run_that_fails_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    changes = SHORT | {"rollout": {"max_new_tokens": 16, "deadline_s": 1e-6}}
    with pytest.raises(RollmillError):
        run(tiny_run(tmp_path, **changes), out=out, view=PlainView(io.StringIO()))
    assert main(["status", str(out)]) == 0
    printed = capsys.readouterr().out
    assert f"run {out}: failed" in printed
    assert "failed: " in printed.splitlines()[-1]


def test_late_and_gone_processes_are_marked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.yaml").write_text("steps: 3\n")
    assert main(["status", str(tmp_path)]) == 0
    assert "no process has reported yet" in capsys.readouterr().out
    (tmp_path / "processes").mkdir()
    beat = {"name": "trainer", "host": "another", "pid": 1, "began": 0.0, "beat": 0.0, "doing": "roll out"}
    (tmp_path / "processes" / "trainer.json").write_text(json.dumps(beat))
    assert main(["status", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "LATE" in printed
    assert ": late" in printed


def test_what_is_no_run_ends_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", str(tmp_path)]) == 2
    assert "holds no run" in capsys.readouterr().err


def test_durations() -> None:
    assert [duration(each) for each in (-1, 4.4, 200, 9000)] == ["0 s", "4 s", "3 min", "2.5 h"]


def test_a_stopped_process_is_marked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.yaml").write_text("steps: 3\n")
    if (child := os.fork()) == 0:
        HeartbeatWriter(tmp_path, "trainer")
        signal.pause()
        os._exit(0)
    try:
        while not (tmp_path / "processes/trainer.json").exists():
            time.sleep(0.01)
        os.kill(child, signal.SIGSTOP)
        os.waitid(os.P_PID, child, os.WSTOPPED | os.WNOWAIT)
        assert main(["status", str(tmp_path)]) == 0
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    printed = capsys.readouterr().out
    assert ": stopped" in printed
    assert f"STOPPED: `kill -CONT {child}` continues it" in " ".join(printed.split())


def test_an_endpoint_that_is_away_is_what_a_process_waits_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").write_text("steps: 3\n")
    OUTAGES.begin("the judge m at http://x/v1", "does not answer: status 503")
    try:
        beat = HeartbeatWriter(tmp_path, "trainer")
        beat.set_activity("reward, step 2 of 3", "rewards of 4 groups")
        assert main(["status", str(tmp_path), "--json"]) == 0
    finally:
        OUTAGES.end("the judge m at http://x/v1")
    [process] = json.loads(capsys.readouterr().out)["processes"]
    assert process["waits_for"] == "the judge m at http://x/v1 (does not answer: status 503; for 0 s)"
    beat.close("done")
