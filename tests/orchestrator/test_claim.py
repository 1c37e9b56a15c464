"""Two processes cannot work on one run."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import time
from pathlib import Path

import pytest
from support.tiny import tiny_run

import rollmill
from rollmill.errors import ConfigError
from rollmill.launch import next_free_folder, resume
from rollmill.supervision.run_lock import TRAINER_LOCK, hold_run_lock, is_run_locked, will_restart


def test_a_run_that_goes_on_cannot_be_started_or_resumed_again(tmp_path: Path) -> None:
    out = tmp_path / "out"
    path = tiny_run(tmp_path)
    with hold_run_lock(out):
        (out / "config.yaml").write_text("first")
        with pytest.raises(ConfigError, match=rf"out is in use by process {os.getpid()} on .*; wait until it ends"):
            rollmill.run(path, out=out)
        with pytest.raises(ConfigError, match="out is in use"):
            resume(out)
        assert (out / "config.yaml").read_text() == "first"
    assert not is_run_locked(out)


def test_a_run_without_out_takes_the_next_number(tmp_path: Path) -> None:
    assert next_free_folder(tmp_path / "out") == tmp_path / "out"
    with hold_run_lock(tmp_path / "out"):
        assert next_free_folder(tmp_path / "out") == tmp_path / "out-2"


def test_a_process_that_was_killed_has_nothing(tmp_path: Path) -> None:
    if (child := os.fork()) == 0:
        with hold_run_lock(tmp_path):
            os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert (tmp_path / "run.lock").read_text().startswith(f"process {child} ")
    with hold_run_lock(tmp_path):
        assert (tmp_path / "run.lock").read_text().startswith(f"process {os.getpid()} ")


def test_the_command_that_supervises_a_killed_process_is_known(tmp_path: Path) -> None:
    assert not will_restart(tmp_path)
    for owner, lives in ((None, False), (os.getpid(), True)):
        if (child := os.fork()) == 0:
            with hold_run_lock(tmp_path, owner=owner):
                os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(child, 0)
        assert not is_run_locked(tmp_path)
        assert will_restart(tmp_path) == lives


def test_a_trainer_waits_for_one_that_is_about_to_end(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        with hold_run_lock(tmp_path, TRAINER_LOCK):
            os.write(writer, b".")
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
    os.read(reader, 1)
    with pytest.raises(ConfigError, match=f"is in use by process {child} on"), hold_run_lock(tmp_path, TRAINER_LOCK):
        pass
    with hold_run_lock(tmp_path, TRAINER_LOCK, wait_s=60):
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def test_a_disk_without_locks_stops_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with hold_run_lock(tmp_path), hold_run_lock(tmp_path):
        pass


def test_a_run_that_begins_again_forgets_who_worked_on_it(tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / "processes").mkdir(parents=True)
    (out / "processes" / "explorer-9.json").write_text("{}")
    with pytest.raises(ConfigError, match="the budget is"):
        rollmill.run(tiny_run(tmp_path, offload={"budget_gb": 1e-6}), out=out)
    assert not (out / "processes" / "explorer-9.json").exists()
