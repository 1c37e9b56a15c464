"""Locks a run directory for one process: two that continue a run would overwrite each other's steps."""

from __future__ import annotations

import errno
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from rollmill.errors import ConfigError
from rollmill.files import explain_write_errors, is_locked, lock_holder, make_durable_folder, try_lock

LOCK, TRAINER_LOCK = "run.lock", "trainer.lock"
"""The second is for a trainer in another process than the command; it may outlive the command briefly."""
_LOOK_S = 0.05
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@contextmanager
def hold_run_lock(run_dir: Path, lock: str = LOCK, wait_s: float = 0.0) -> Iterator[None]:
    """Inside, no other process runs or resumes the run in this directory; on a disk without locks this is not checked.

    Args:
        lock: TRAINER_LOCK: no other process trains.
        wait_s: how long to wait for the lock.

    Raises:
        ConfigError: another process holds the lock; names it.
        RollmillError: the directory cannot be written.
    """
    path = run_dir / lock
    with explain_write_errors(path):
        make_durable_folder(run_dir)
        ends = time.monotonic() + wait_s
        while (held := _locked(path)) is None and time.monotonic() < ends:
            time.sleep(_LOOK_S)
        if held is None:
            text = f"{run_dir} is in use by {lock_holder(path)}; wait until it ends"
            raise ConfigError(f"{text}, or choose another folder with --out")
    with held:
        yield


def is_run_locked(run_dir: Path) -> bool:
    """True if a process runs or resumes the run in this directory."""
    return is_locked(run_dir / LOCK)


def _locked(path: Path) -> IO[str] | None:
    try:
        return try_lock(path)
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return path.open("a")
        raise
