"""What `rollmill status` knows of a run."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from rollmill.errors import ConfigError
from rollmill.trackers.heartbeat import (
    HEARTBEAT_INTERVAL_S,
    LATE_BEATS,
    HeartbeatRecord,
    HeartbeatWriter,
    keep_heartbeat,
    process_state,
    read_heartbeats,
    read_status,
)

NOW = time.time()
ALIVE = HeartbeatRecord("trainer", socket.gethostname(), os.getpid(), NOW, NOW, "train", since=NOW)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    stages = [{"name": "warm", "steps": 2}, {"name": "main", "steps": 4}]
    (tmp_path / "config.yaml").write_text(json.dumps({"stages": stages}))
    rows: list[dict[str, Any]] = [{"step": n, "stage": "warm", "seconds/total": 9.0} for n in (1, 2)]
    rows += [{"step": n, "stage": "main", "seconds/total": n, "reward/mean": n / 10} for n in (3, 4)]
    rows.insert(0, {"step": 0, "eval/greedy": 0.5})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def say(run: Path, *beats: HeartbeatRecord) -> None:
    """The processes have said that; what was said `now` is said now."""
    (run / "processes").mkdir(exist_ok=True)
    for beat in (replace(beat, beat=time.time()) if beat.beat == NOW else beat for beat in beats):
        (run / "processes" / f"{beat.name}.json").write_text(json.dumps(asdict(beat)))


def gone() -> HeartbeatRecord:
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    return replace(ALIVE, name="explorer 1", pid=done.pid)


def test_where_a_run_is(run: Path) -> None:
    say(run, ALIVE)
    status = read_status(run)
    at = status.position
    assert (at.stage, at.step, at.stage_steps, at.total, at.total_steps) == ("main", 2, 4, 4, 6)
    assert (at.seconds_per_step, at.reward, status.seconds_left) == (3.5, 0.4, 7.0)
    assert status.state == "running"


def test_a_run_that_has_not_made_a_step(run: Path) -> None:
    (run / "metrics.jsonl").unlink()
    status = read_status(run)
    assert (status.position.stage, status.position.total, status.seconds_left) == ("warm", 0, None)
    assert status.state == "unknown"


def test_a_clock_that_was_set_ahead_makes_no_other_process(tmp_path: Path) -> None:
    """The start of a process in seconds since the epoch moves with the clock."""
    HeartbeatWriter(tmp_path, "trainer").close("")
    [beat] = read_heartbeats(tmp_path)
    before = replace(beat, began=NOW - 3 * 86400, beat=NOW - 3 * 86400)
    assert process_state(before, before.beat) == "alive"
    assert process_state(replace(before, started=0), before.beat) == "gone"
    assert process_state(replace(beat, started=beat.started - 1), beat.beat) == "gone", "its number was given again"


def test_states_of_processes() -> None:
    assert process_state(ALIVE, NOW + HEARTBEAT_INTERVAL_S) == "alive"
    assert process_state(ALIVE, NOW + LATE_BEATS * HEARTBEAT_INTERVAL_S + 1) == "late"
    assert process_state(replace(ALIVE, ended="done"), NOW + 1000) == "ended"
    assert process_state(gone(), NOW) == "gone"
    assert (
        process_state(replace(gone(), host="another"), NOW + HEARTBEAT_INTERVAL_S) == "alive"
    )  # its processes cannot be looked at


def test_an_id_that_another_process_has_now() -> None:
    assert process_state(replace(ALIVE, began=NOW - 10**6), NOW) == "gone"


@pytest.mark.parametrize(
    ("found", "summary", "state"),
    [
        ([ALIVE, replace(ALIVE, name="x", ended="failed: out of memory")], None, "running"),
        ([replace(ALIVE, ended="done")], "done", "done"),
        ([replace(ALIVE, ended="interrupted")], "interrupted", "interrupted"),
        ([replace(ALIVE, ended="failed: out of memory")], None, "failed"),
        ([replace(ALIVE, beat=NOW - 1000)], "interrupted", "late"),
        ([replace(ALIVE, ended="done"), replace(ALIVE, name="explorer 0", ended="failed: a reward")], "done", "done"),
        ([replace(ALIVE, ended="done"), replace(ALIVE, name="explorer 0", pid=2**30)], "done", "done"),
        ([replace(ALIVE, pid=2**30), replace(ALIVE, name="explorer 0")], None, "killed"),
        ([replace(ALIVE, name="explorer 0")], None, "unknown"),
    ],
)
def test_states_of_runs(run: Path, found: list[HeartbeatRecord], summary: str | None, state: str) -> None:
    say(run, *found)
    if summary is not None:
        (run / "summary.json").write_text(json.dumps({"status": summary}))
    assert read_status(run).state == state


def test_a_killed_run(run: Path) -> None:
    say(run, replace(gone(), name="trainer"))
    assert read_status(run).state == "killed"


def test_no_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no run"):
        read_status(tmp_path)


@pytest.mark.parametrize(
    ("error", "ended"),
    [
        (KeyboardInterrupt(), "interrupted"),
        (ValueError("a bad day"), "failed: a bad day"),
        (MemoryError(), "failed: MemoryError"),
        (None, "done"),
    ],
)
def test_how_a_process_ended(tmp_path: Path, error: BaseException | None, ended: str) -> None:
    def work(heartbeat: HeartbeatWriter) -> None:
        heartbeat.set_activity("work", "nothing")
        if error is not None:
            raise error

    expected = nullcontext() if error is None else pytest.raises(type(error))
    with expected, keep_heartbeat(tmp_path, "trainer") as heartbeat:
        work(heartbeat)
    assert [each.ended for each in read_heartbeats(tmp_path)] == [ended]
