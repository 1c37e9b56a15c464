"""One attempt at a run: a forked process that trains, reports how it ended, and does not outlive its supervisor."""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO, Any, NoReturn

from rollmill.config.loader import LoadedRun
from rollmill.progress import begin_uncounted_work, count_signals, end_uncounted_work
from rollmill.supervision.budget import RunOutcome
from rollmill.supervision.memory import MemoryReduction
from rollmill.supervision.watchdog import DUMP_SIGNAL, memory_file
from rollmill.trackers.event_log import record_event

_PR_SET_PDEATHSIG = 1
REDUCED = "reduced"
"""Event: an attempt has smaller settings (`changes`)."""


@dataclass(frozen=True)
class RunAttempt:
    """State that a process that trains and its supervisor share. The files have no name, and are read by position.

    Args:
        run_dir: known from an earlier attempt, which the next one resumes; None: the run has not begun.
        locked: the supervisor holds the lock of the run directory.
    """

    run_dir: Path | None
    locked: bool
    reduction: MemoryReduction
    supervisor: int = field(default_factory=os.getpid)
    report: IO[bytes] = field(default_factory=memory_file)
    stacks: IO[bytes] = field(default_factory=memory_file)

    # -- in the process that trains ------------------------------------------------------------------------------

    def begin(self, loaded: LoadedRun, run_dir: Path) -> tuple[LoadedRun, list[str]]:
        """Tell the supervisor the run's directory. Returns the run with the settings of this attempt, and the changes
        of settings in words, which are recorded as an event, too."""
        end_uncounted_work()
        limit = loaded.config.supervise.stall_limit(loaded.stages)
        self._write({"run_dir": str(run_dir), "stall_s": limit})
        loaded, changes = self.reduction.apply(loaded)
        if changes:
            record_event(run_dir, REDUCED, changes=changes)
        return loaded, [f"after running out of memory: {change}" for change in changes]

    def run(self, train: Callable[[RunAttempt], dict[str, Any]], signals: Iterable[int]) -> NoReturn:
        """Train in this process, which has just been forked, and exit: the frames of the supervisor stay untouched.

        Args:
            signals: those that are blocked outside of the supervisor.
        """
        code = 1
        try:
            try:
                _die_with(self.supervisor)
                faulthandler.register(DUMP_SIGNAL, self.stacks, chain=False)
                faulthandler.enable(self.stacks)  # a crash, too, shows where it happened
                begin_uncounted_work()
                if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                    signal.signal(signal.SIGINT, _interrupt)
                signal.pthread_sigmask(signal.SIG_SETMASK, signals)
                outcome = RunOutcome("done", train(self), exit_code=0)
            except BaseException as error:
                outcome = RunOutcome.of(error)
            code = outcome.exit_code
            self._write({"outcome": asdict(outcome)})
            if outcome.status == "done":
                threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, such as a tracker's uploads
            atexit._run_exitfuncs()
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
        finally:
            os._exit(code)

    def _write(self, line: dict[str, Any]) -> None:
        self.report.write(json.dumps(line).encode() + b"\n")
        self.report.flush()

    # -- in the supervisor ---------------------------------------------------------------------------------------

    def read(self, key: str) -> dict[str, Any] | None:
        """Return the report that has `key`, if it was written: `run_dir` or `outcome`."""
        size = os.fstat(self.report.fileno()).st_size
        for line in os.pread(self.report.fileno(), size, 0).splitlines(keepends=True):
            if line.endswith(b"\n") and key in (found := json.loads(line)):
                return dict(found)
        return None

    def outcome(self) -> RunOutcome | None:
        """Return how the process says that it ended; None if it did not say."""
        found = self.read("outcome")
        return None if found is None else RunOutcome(**found["outcome"])

    def close(self) -> None:
        """Release the files."""
        self.report.close()
        self.stacks.close()


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt once for each Ctrl-C, until the run handles signals itself."""
    if count_signals():
        raise KeyboardInterrupt


def _die_with(supervisor: int) -> None:
    """Have this process killed when its supervisor ends, however it does."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != supervisor:
        os._exit(1)
