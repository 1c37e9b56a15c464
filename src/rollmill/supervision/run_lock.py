"""Locks a run directory for one process: two that continue a run would overwrite each other's steps."""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import psutil

from rollmill.errors import ConfigError
from rollmill.files import describe_process, explain_write_errors, is_locked, lock_holder, make_durable_folder, try_lock

LOCK, TRAINER_LOCK = "run.lock", "trainer.lock"
"""The second is for a trainer in another process than the command; it may outlive the command briefly."""
_LOOK_S, _ENDING_S = 0.05, 10.0
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@contextmanager
def hold_run_lock(run_dir: Path, lock: str = LOCK, wait_s: float = 0.0, owner: int | None = None) -> Iterator[None]:
    """Inside, no other process runs or resumes the run in this directory; on a disk without locks this is not checked.

    Args:
        lock: TRAINER_LOCK: no other process trains.
        wait_s: how long to wait for the lock; longer if its owner is gone, whose other processes are ending then.
        owner: the process that others should name; default: this one.

    Raises:
        ConfigError: another process holds the lock; names it.
        RollmillError: the directory cannot be written.
    """
    path = run_dir / lock
    with explain_write_errors(path):
        make_durable_folder(run_dir)
        began = time.monotonic()
        while (held := _locked(path)) is None:
            waited = time.monotonic() - began
            if waited >= wait_s and (waited >= _ENDING_S or not _owner_is_gone(path)):
                break
            time.sleep(_LOOK_S)
        if held is None:
            text = f"{run_dir} is in use by {_describe_owner(path)}; wait until it ends"
            raise ConfigError(f"{text}, or choose another folder with --out")
        if owner is not None:
            held.truncate(0)
            held.write(f"process {owner} on {socket.gethostname()}\n")
            held.flush()
    with held:
        yield


def is_run_locked(run_dir: Path) -> bool:
    """True if a process runs or resumes the run in this directory."""
    return is_locked(run_dir / LOCK)


def will_restart(run_dir: Path) -> bool:
    """True if the command that supervises the run has not ended: a process that trains was killed, it starts another,
    and takes the lock a moment later."""
    path = run_dir / LOCK
    return path.is_file() and _owner(path) is not None and not _owner_is_gone(path)


def _owner(path: Path) -> int | None:
    """Return the process that a lock's file names; None if it is not one of this host."""
    words = path.read_text().split()
    return int(words[1]) if len(words) == 4 and words[1].isdecimal() and words[3] == socket.gethostname() else None


def _owner_is_gone(path: Path) -> bool:
    """True if the process that a lock names was one of this host, and has ended."""
    if (pid := _owner(path)) is None:
        return False
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _describe_owner(path: Path) -> str:
    """Describe the process that others should name: the owner in the file, or else who holds the lock."""
    pid = _owner(path)
    return lock_holder(path) if pid is None or not psutil.pid_exists(pid) else describe_process(pid)


def _locked(path: Path) -> IO[str] | None:
    try:
        return try_lock(path)
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return path.open("a")
        raise
