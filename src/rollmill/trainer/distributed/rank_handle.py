"""A rank besides the first, wherever it is, seen from the first: what it is told, what it answers, how it ends."""

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

from rollmill.errors import DeadlineError, RollmillError, TrainerRankLostError, TrainingError
from rollmill.trainer.distributed.ranks import FileRendezvous, GroupRendezvous

_LONGER = "Raise trainer.rank_deadline_s, or see what it does."
CommandStatus = Literal["done", "failed", "alone", "late", "ended"]


@dataclass(frozen=True)
class CommandResult:
    """What came of a command on a rank: it was done; failed; failed since another rank was gone or late; is not done
    yet; or the rank has ended."""

    kind: CommandStatus
    text: str = ""


class RankHandle(ABC):
    """Does what it is told, one command after the other; telling never waits."""

    rank: int
    lost: ClassVar[tuple[CommandStatus, ...]] = ("ended",)
    """Outcomes that another life of the trainer may cure."""

    @property
    @abstractmethod
    def label(self) -> str:
        """The rank and its process, for messages."""

    @property
    @abstractmethod
    def log(self) -> str:
        """What it has printed, or where that is: one or more sentences."""

    @abstractmethod
    def tell(self, command: str, *details: Any) -> None:
        """Give a command, a method of `Worker`; `answer` waits for what comes of it. Raises TrainingError where it is
        known to have ended."""

    @abstractmethod
    def outcome(self, command: str, deadline_s: float) -> CommandResult:
        """What has come of a command by the deadline."""

    @abstractmethod
    def end(self) -> None:
        """Kill it, and wait until it is gone."""

    @abstractmethod
    def finish(self) -> None:
        """Let it end by itself, or kill it where it does not."""

    def answer(self, command: str, deadline_s: float) -> None:
        """Wait until a command is done.

        Raises:
            TrainingError: it failed; TrainerRankLostError where it ended.
            DeadlineError: it did not answer in time.
        """
        outcome = self.outcome(command, deadline_s)
        if outcome.kind != "done":
            raise self.error(command, outcome, deadline_s)

    def error(self, command: str, outcome: CommandResult, deadline_s: float) -> RollmillError:
        """What to say of a command that was not done."""
        told, lost = f"{self.label}, told to `{command}`", outcome.kind in self.lost
        longer = "Is its host short of memory or cores?" if command == "start" else _LONGER
        if outcome.kind == "late" and not lost:
            return DeadlineError("rank 0", told, deadline_s, f"{longer} {self.log}")
        hows = {"ended": outcome.text, "done": "lost rank 0", "late": f"did not answer for {deadline_s:g} s"}
        how = hows.get(outcome.kind, f"failed: {outcome.text}")
        again = longer if outcome.kind == "late" else "Go on from the last checkpoint with `rollmill resume`."
        return (TrainerRankLostError if lost else TrainingError)(f"{told}, {how}. {again} {self.log}")


class RankLauncher(Protocol):
    """Starts the other ranks of a stage, and hands them what they work on."""

    @property
    def own_gpus(self) -> bool:
        """Whether every rank sees GPUs of its own only."""
        ...

    def open(self) -> GroupRendezvous:
        """Where ranks will meet, until `close`."""
        ...

    def start(self, rank: int, threads: int) -> RankHandle:
        """Start a rank that computes with so many threads; it may not be there yet."""
        ...

    def handed(self, name: str, value: Any) -> AbstractContextManager[Any]:
        """What ranks are told in place of `value`; inside they have to have done what it is for."""
        ...

    def close(self) -> None:
        """The ranks have ended."""
        ...


# Ranks as child processes of the first: pipes for commands, files for what they work on.

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
