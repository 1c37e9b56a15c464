"""A rank besides the first, wherever it is, seen from the first: what it is told, what it answers, how it ends."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

from rollmill.errors import DeadlineError, RollmillError, TrainerRankLostError, TrainingError
from rollmill.trainer.distributed.process_group import GroupRendezvous

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
