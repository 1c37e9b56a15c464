"""Ranks as child processes of the first: pipes for commands, files for what they work on."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from rollmill.errors import TrainingError
from rollmill.trainer.distributed.process_group import FileRendezvous
from rollmill.trainer.distributed.rank_handle import CommandResult, RankHandle

_TAIL = 2000
_END_S = 5.0


class ProcessRankHandle(RankHandle):
    """A child process. Messages are small, so that telling it something never waits; large things go through files.

    Args:
        folder: with these files; it removes them where the first rank cannot.
        log: file that takes what it prints.
        threads: that it computes with.
    """

    def __init__(self, rank: int, folder: Path, log: Path, threads: int) -> None:
        self.rank, self._log = rank, log
        self._connection, theirs = multiprocessing.Pipe()
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        log.parent.mkdir(parents=True, exist_ok=True)
        self._begins = log.stat().st_size if log.exists() else 0
        with log.open("ab") as file:
            self._popen = subprocess.Popen(
                [sys.executable, "-P", "-m", "rollmill.trainer.distributed.worker", str(theirs.fileno()), str(folder)],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                env=environment | {"OMP_NUM_THREADS": str(threads)},
                start_new_session=True,  # Ctrl-C is for the first rank alone
            )
        theirs.close()

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def label(self) -> str:
        """See RankHandle."""
        return f"rank {self.rank} (process {self.pid})"

    @property
    def log(self) -> str:
        """The last lines that this process printed."""
        with self._log.open("rb") as file:
            file.seek(max(self._begins, self._log.stat().st_size - _TAIL))
            text = file.read().decode(errors="replace").strip()
        return f"The end of {self._log}:\n{text}" if text else f"It printed nothing to {self._log}."

    def tell(self, command: str, *details: Any) -> None:
        """See RankHandle."""
        try:
            self._connection.send((command, *details))
        except OSError:
            raise self.error(command, self._ended(), 0) from None

    def outcome(self, command: str, deadline_s: float) -> CommandResult:
        """See RankHandle."""
        if not self._connection.poll(deadline_s):
            return CommandResult("late")
        try:
            found: CommandResult = self._connection.recv()
            return found
        except (EOFError, OSError):
            return self._ended()

    def end(self) -> None:
        """See RankHandle."""
        self._connection.close()
        self._popen.kill()
        self._popen.wait()

    def finish(self) -> None:
        """See RankHandle."""
        try:
            self.tell("close")
            self._popen.wait(_END_S)
        except (TrainingError, subprocess.TimeoutExpired):
            pass
        self.end()

    def _ended(self) -> CommandResult:
        try:
            code = self._popen.wait(_END_S)
        except subprocess.TimeoutExpired:
            return CommandResult("ended", "hung up")
        if code >= 0:
            return CommandResult("ended", f"ended with exit status {code}")
        memory = " (out of memory?)" if code == -9 else ""
        return CommandResult("ended", f"was killed by signal {-code}{memory}")


class ProcessRankLauncher:
    """Child processes, which share a temporary folder with the first rank; see Crew.

    Args:
        logs: folder for what they print.
    """

    own_gpus = False

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._folder: tempfile.TemporaryDirectory[str]

    @property
    def folder(self) -> Path:
        """What they share."""
        return Path(self._folder.name)

    def open(self) -> FileRendezvous:
        """See Crew."""
        self._folder = tempfile.TemporaryDirectory(prefix="rollmill-ranks-")
        return FileRendezvous(self.folder)

    def start(self, rank: int, threads: int) -> ProcessRankHandle:
        """See Crew."""
        return ProcessRankHandle(rank, self.folder, self._logs / f"rank-{rank}.log", threads)

    @contextmanager
    def handed(self, name: str, value: Any) -> Iterator[Path]:
        """See Crew: a file, which is gone afterwards; who has it in memory keeps it."""
        file = self.folder / name
        torch.save(value, file)
        yield file
        file.unlink()

    def close(self) -> None:
        """See Crew."""
        self._folder.cleanup()
