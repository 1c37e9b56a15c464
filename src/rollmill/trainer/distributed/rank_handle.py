"""Rank 0's handles of the other ranks: sending commands, waiting for results, ending them.

`RankHandle` and `RankLauncher` are the interfaces; ranks are child processes here, and Ray actors in ray_ranks.py.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

import torch

from rollmill.errors import (
    DeadlineError,
    RollmillError,
    TrainerRankLostError,
    TrainerRankMemoryError,
    TrainingError,
    count_oom_kills,
)
from rollmill.trainer.distributed.ranks import FileRendezvous, GroupRendezvous

_LONGER = "Raise trainer.rank_deadline_s, or see what it does."
CommandStatus = Literal["done", "failed", "alone", "late", "ended"]


@dataclass(frozen=True)
class CommandResult:
    """Result of a command on a rank.

    done: it succeeded; failed: it raised; alone: it failed because another rank was gone or late; late: it has not
    finished by the deadline; ended: the rank's process has ended.
    """

    kind: CommandStatus
    text: str = ""
    out_of_memory: bool = False  #: the reason why it failed or ended


class RankHandle(ABC):
    """Runs commands on one rank, one after the other; sending a command never waits."""

    rank: int
    _killed_before: int
    lost: ClassVar[tuple[CommandStatus, ...]] = ("ended",)
    """Outcomes that restarting the trainer may fix."""

    @property
    @abstractmethod
    def label(self) -> str:
        """The rank and its process, for messages."""

    @property
    @abstractmethod
    def log(self) -> str:
        """The rank's output, or its location: one or more sentences."""

    @abstractmethod
    def send(self, command: str, *details: Any) -> None:
        """Sends a command, a method of `RankWorker`; `wait` waits for its result.

        Raises:
            TrainingError: the rank is known to have ended.
        """

    @abstractmethod
    def outcome(self, command: str, deadline_s: float) -> CommandResult:
        """Waits for the result of a command until the deadline."""

    @abstractmethod
    def end(self) -> None:
        """Kills the rank and waits until it is gone."""

    @abstractmethod
    def finish(self) -> None:
        """Lets the rank exit by itself; kills it if it does not."""

    def wait(self, command: str, deadline_s: float) -> None:
        """Waits until a command is done.

        Raises:
            TrainingError: it failed; TrainerRankLostError if the rank ended.
            DeadlineError: it did not finish in time.
        """
        outcome = self.outcome(command, deadline_s)
        if outcome.kind != "done":
            raise self.error(command, outcome, deadline_s)

    def error(self, command: str, outcome: CommandResult, deadline_s: float) -> RollmillError:
        """Builds the error for a command that was not done."""
        told, lost = f"{self.label}, told to `{command}`", outcome.kind in self.lost
        longer = "Is its host short of memory or cores?" if command == "start" else _LONGER
        if outcome.kind == "late" and not lost:
            return DeadlineError("rank 0", told, deadline_s, f"{longer} {self.log}")
        hows = {"ended": outcome.text, "done": "lost rank 0", "late": f"did not answer for {deadline_s:g} s"}
        how = hows.get(outcome.kind, f"failed: {outcome.text}")
        again = longer if outcome.kind == "late" else "Go on from the last checkpoint with `rollmill resume`."
        kind = TrainerRankLostError if lost else TrainingError
        return (TrainerRankMemoryError if outcome.out_of_memory else kind)(f"{told}, {how}. {again} {self.log}")

    def killed_for_memory(self) -> bool:
        """True if the kernel of this host has killed a process because memory ran out since the rank was started."""
        return count_oom_kills() > self._killed_before


class RankLauncher(Protocol):
    """Starts the other ranks of a stage and passes them their data."""

    @property
    def own_gpus(self) -> bool:
        """True if every rank sees only its own GPUs."""
        ...

    def open(self) -> GroupRendezvous:
        """Opens the rendezvous of the ranks, until `close`."""
        ...

    def start(self, rank: int, threads: int) -> RankHandle:
        """Starts a rank with this number of threads; it may not be running yet."""
        ...

    def handed(self, name: str, value: Any) -> AbstractContextManager[Any]:
        """Context that yields what to send in place of `value`; ranks must be done with it at the end."""
        ...

    def close(self) -> None:
        """Releases everything once the ranks have ended."""
        ...


_TAIL = 2000
_KILLED_FOR_MEMORY = ": the kernel has killed it because memory ran out"
_END_S = 5.0
_PROGRAM = """
import pathlib, sys
from rollmill.waiting import exit_when_closed
exit_when_closed(int(sys.argv[1]), pathlib.Path(sys.argv[2]))
from rollmill.trainer.distributed.worker import main
main()
"""


class ProcessRankHandle(RankHandle):
    """A child process. Commands go through a pipe and are small, so that sending never waits; large values go through
    files.

    Args:
        folder: folder of these files; the child removes it if rank 0 cannot.
        log: file for the child's output.
        threads: number of threads to compute with.
    """

    def __init__(self, rank: int, folder: Path, log: Path, threads: int) -> None:
        self.rank, self._log, self._killed_before = rank, log, count_oom_kills()
        self._connection, theirs = multiprocessing.Pipe()
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        log.parent.mkdir(parents=True, exist_ok=True)
        self._begins = log.stat().st_size if log.exists() else 0
        with log.open("ab") as file:
            self._popen = subprocess.Popen(
                [sys.executable, "-P", "-c", _PROGRAM, str(theirs.fileno()), str(folder)],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                env=environment | {"OMP_NUM_THREADS": str(threads)},
                start_new_session=True,  # Ctrl-C goes to rank 0 only
            )
        theirs.close()

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def label(self) -> str:
        return f"rank {self.rank} (process {self.pid})"

    @property
    def log(self) -> str:
        """The last lines of this process's output."""
        with self._log.open("rb") as file:
            file.seek(max(self._begins, self._log.stat().st_size - _TAIL))
            text = file.read().decode(errors="replace").strip()
        return f"The end of {self._log}:\n{text}" if text else f"It printed nothing to {self._log}."

    def send(self, command: str, *details: Any) -> None:
        try:
            self._connection.send((command, *details))
        except OSError:
            raise self.error(command, self._ended(), 0) from None

    def outcome(self, command: str, deadline_s: float) -> CommandResult:
        if not self._connection.poll(deadline_s):
            return CommandResult("late")
        try:
            found: CommandResult = self._connection.recv()
            return found
        except (EOFError, OSError):
            return self._ended()

    def end(self) -> None:
        self._connection.close()
        self._popen.kill()
        self._popen.wait()

    def finish(self) -> None:
        try:
            self.send("close")
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
        memory = code == -9 and self.killed_for_memory()
        return CommandResult("ended", f"was killed by signal {-code}{_KILLED_FOR_MEMORY if memory else ''}", memory)


class ProcessRankLauncher:
    """Starts ranks as child processes, which share a temporary folder with rank 0.

    Args:
        logs: folder for their output.
    """

    own_gpus = False

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._folder: tempfile.TemporaryDirectory[str]

    @property
    def folder(self) -> Path:
        return Path(self._folder.name)

    def open(self) -> FileRendezvous:
        self._folder = tempfile.TemporaryDirectory(prefix="rollmill-ranks-")
        return FileRendezvous(self.folder)

    def start(self, rank: int, threads: int) -> ProcessRankHandle:
        return ProcessRankHandle(rank, self.folder, self._logs / f"rank-{rank}.log", threads)

    @contextmanager
    def handed(self, name: str, value: Any) -> Iterator[Path]:
        """Yields a file, which is removed at the end; ranks that mapped it keep its contents."""
        file = self.folder / name
        torch.save(value, file)
        yield file
        file.unlink()

    def close(self) -> None:
        self._folder.cleanup()
