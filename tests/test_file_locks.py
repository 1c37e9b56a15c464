"""Locks name their holder, on whatever host it is, and whether it is stopped."""

from __future__ import annotations

import os
import signal
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rollmill.buffer.database import database_error, sqlite_url
from rollmill.files import lock_holder, try_lock

HOST = socket.gethostname()
LOCKS = "import fcntl, sys; file = open(sys.argv[1], 'a'); fcntl.flock(file, fcntl.LOCK_EX)"
WRITES = """
import sqlite3, sys
kept = sqlite3.connect(sys.argv[1], isolation_level=None)
kept.execute("BEGIN IMMEDIATE")
"""


@contextmanager
def holder(program: str, path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds a lock of the file, and waits."""
    kept = f"{program}\nprint('held', flush=True)\nsys.stdin.read()"
    command = [sys.executable, "-c", kept, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        try:
            yield process
        finally:
            process.kill()


def test_the_holder_of_a_lock_is_known_by_its_process(tmp_path: Path) -> None:
    path = tmp_path / "0.lock"
    with holder(LOCKS, path) as process:
        assert try_lock(path) is None
        assert lock_holder(path).startswith(f"process {process.pid} on {HOST} ({sys.executable}")
        assert "stopped" not in lock_holder(path)
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        assert f"it is stopped: `kill -CONT {process.pid}` continues it" in lock_holder(path)
    locked = try_lock(path)
    assert locked is not None  # that of a process that was killed is free
    locked.close()


def test_a_lock_of_another_host_says_who_holds_it(tmp_path: Path) -> None:
    (tmp_path / "run.lock").write_text("process 7 on elsewhere\n")
    assert lock_holder(tmp_path / "run.lock") == "process 7 on elsewhere"
    (tmp_path / "run.lock").write_bytes(b"\x00\xff" * 500)
    assert lock_holder(tmp_path / "run.lock", tmp_path / "none") == "another process"


def test_a_lock_names_this_process_in_its_file(tmp_path: Path) -> None:
    (tmp_path / "a.lock").write_text("process 7 on a host with a name that is longer\n")
    with try_lock(tmp_path / "a.lock") or pytest.fail("it is locked"):
        assert (tmp_path / "a.lock").read_text() == f"process {os.getpid()} on {HOST}\n"


def test_a_locked_database_names_the_process_that_writes(tmp_path: Path) -> None:
    path = tmp_path / "buffer.sqlite"
    with sqlite3.connect(path) as own:
        own.execute("PRAGMA journal_mode=WAL")
        own.execute("CREATE TABLE t (a)")
    with holder(WRITES, path) as process:
        error = database_error(sqlite_url(path), sqlite3.OperationalError("database is locked"), 60)
    assert f"database is locked; process {process.pid} on {HOST}" in str(error)
    assert "holds it; let that go on, or end it" in str(error)
