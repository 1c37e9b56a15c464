"""A run directory belongs to one process at a time: two that continue a run would overwrite each other's steps."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from rollmill.core.errors import ConfigError
from rollmill.master.notices import is_held, locked
from rollmill.monitor.files import writing

LOCK = "run.lock"
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@contextmanager
def claimed(run_dir: Path) -> Iterator[None]:
    """Inside, no other process runs or resumes what is in this directory; on a disk without locks nobody knows.

    Raises:
        ConfigError: another process does; says which.
        RollmillError: the directory cannot be written.
    """
    path = run_dir / LOCK
    with writing(path):
        run_dir.mkdir(parents=True, exist_ok=True)
        lock = _locked(path)
        if lock is None:
            who = path.read_text().strip() or "another process"
            raise ConfigError(f"{run_dir} is in use by {who}; wait until it ends, or choose another folder with --out")
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        lock.flush()
    with lock:
        yield


def is_claimed(run_dir: Path) -> bool:
    """Whether a process runs or resumes what is in this directory."""
    return is_held(run_dir / LOCK)


def _locked(path: Path) -> IO[str] | None:
    try:
        return locked(path)
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return path.open("a")
        raise
