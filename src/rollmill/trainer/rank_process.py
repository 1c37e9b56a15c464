"""The process of a rank besides the first, seen from the first: what it is told, what it answers, how it ends."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rollmill.core.errors import DeadlineError, RankLostError, RollmillError, TrainingError

_TAIL = 2000
_END_S = 5.0


@dataclass(frozen=True)
class Outcome:
    """What came of a command on a rank: it was done; failed; failed since another rank was gone or late; is not done
    yet; or the process has ended."""

    kind: Literal["done", "failed", "alone", "late", "ended"]
    text: str = ""


class RankProcess:
    """A child process. Messages are small, so that telling it something never waits; large things go through files.

    Args:
        log: file that takes what it prints.
        threads: that it computes with.
    """

    def __init__(self, rank: int, log: Path, threads: int) -> None:
        self.rank, self._log = rank, log
        self._connection, theirs = multiprocessing.Pipe()
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        log.parent.mkdir(parents=True, exist_ok=True)
        self._begins = log.stat().st_size if log.exists() else 0
        with log.open("ab") as file:
            self._popen = subprocess.Popen(
                [sys.executable, "-P", "-m", "rollmill.trainer.rank_worker", str(theirs.fileno())],
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

    def tell(self, command: str, *details: Any) -> None:
        """Send a command; `answer` waits for what comes of it. Raises TrainingError where the process has ended."""
        try:
            self._connection.send((command, *details))
        except OSError:
            raise self.error(command, self._ended(), 0) from None

    def answer(self, command: str, deadline_s: float) -> None:
        """Wait until a command is done.

        Raises:
            TrainingError: it failed, or the process ended; the message shows the end of its log.
            DeadlineError: it did not answer in time.
        """
        outcome = self.outcome(command, deadline_s)
        if outcome.kind != "done":
            raise self.error(command, outcome, deadline_s)

    def outcome(self, command: str, deadline_s: float) -> Outcome:
        """What has come of a command by the deadline."""
        if not self._connection.poll(deadline_s):
            return Outcome("late")
        try:
            return Outcome(*self._connection.recv())
        except (EOFError, OSError):
            return self._ended()

    def error(self, command: str, outcome: Outcome, deadline_s: float) -> RollmillError:
        """What to say of a command that was not done."""
        who = f"rank {self.rank} (process {self.pid})"
        if outcome.kind == "late":
            advice = f"Raise trainer.rank_deadline_s, or see what it does. {self._end_of_log()}"
            return DeadlineError("rank 0", f"{who}, told to `{command}`", deadline_s, advice)
        how = {"ended": outcome.text, "done": "lost rank 0"}.get(outcome.kind, f"failed: {outcome.text}")
        again = "Go on from the last checkpoint with `rollmill resume`."
        kind = RankLostError if outcome.kind == "ended" else TrainingError
        return kind(f"{who}, told to `{command}`, {how}. {again} {self._end_of_log()}")

    def end(self) -> None:
        """Kill it, and wait until it is gone."""
        self._connection.close()
        self._popen.kill()
        self._popen.wait()

    def finish(self) -> None:
        """Let it end by itself, or kill it where it does not."""
        try:
            self.tell("close")
            self._popen.wait(_END_S)
        except (TrainingError, subprocess.TimeoutExpired):
            pass
        self.end()

    def _ended(self) -> Outcome:
        try:
            code = self._popen.wait(_END_S)
        except subprocess.TimeoutExpired:
            return Outcome("ended", "hung up")
        if code >= 0:
            return Outcome("ended", f"ended with exit status {code}")
        memory = " (out of memory?)" if code == -9 else ""
        return Outcome("ended", f"was killed by signal {-code}{memory}")

    def _end_of_log(self) -> str:
        """The last lines that this process printed."""
        with self._log.open("rb") as file:
            file.seek(max(self._begins, self._log.stat().st_size - _TAIL))
            text = file.read().decode(errors="replace").strip()
        return f"The end of {self._log}:\n{text}" if text else f"It printed nothing to {self._log}."
