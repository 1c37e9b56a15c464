"""The supervisor of `rollmill run` and `rollmill resume`: forks the process that trains, and starts it again.

It imports neither torch nor users' code, so little can happen to it. It passes on signals, watches the progress of its
child, and decides after each end: done, failed for good, or again from the newest checkpoint.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from rollmill.config.supervision import SupervisionConfig
from rollmill.errors import ConfigError, RollmillError, count_oom_kills
from rollmill.progress import (
    end_for_restart,
    has_worked,
    pass_on_signal,
    reset_progress,
    signals_passed_on,
    step_reached,
)
from rollmill.startup import ending_signals
from rollmill.supervision.attempt import RunAttempt
from rollmill.supervision.budget import RestartBudget, RunFailedError
from rollmill.supervision.memory import MemoryReduction
from rollmill.supervision.run_lock import hold_run_lock
from rollmill.supervision.watchdog import StallWatchdog, blocked_in, dump_stacks, read_stacks, write_stacks
from rollmill.trackers.event_log import RESTART, record_event
from rollmill.trackers.heartbeat import TRAINER_PROCESS, HeartbeatRecord, read_heartbeats, trainer_activity

Train = Callable[[RunAttempt], dict[str, Any]]
"""Trains in the process that calls it, and returns the run's summary. `attempt.run_dir` says what to resume."""

_TICK_S, _LOOK_S, _LONGEST_LOOK_S = 0.25, 0.02, 1.0
_GRACE_S, _LEAVING_S = 60.0, 60.0
"""For a stalled process to end by itself, with a checkpoint; for one that has reported its end, to exit."""
_LOCK_S = 10.0
_ENDS_AT_ONCE = 3
"""Number of times Ctrl-C that kill: the second one ends a process that Python still controls."""


def can_supervise(config: SupervisionConfig) -> bool:
    """True if this process may fork: it has one thread, the program's own output, and signals can be waited for."""
    return (
        config.restarts > 0
        and sys.platform == "linux"
        and threading.current_thread() is threading.main_thread()
        and threading.active_count() == 1
        and sys.stdout is sys.__stdout__  # a program that calls this one, and keeps the output, gets it in its process
    )


def _wait_for_signal(signals: Sequence[int], wait_s: float) -> signal.struct_siginfo | None:
    """Wait for a blocked signal; None if there is none in time.

    Python's sigtimedwait returns memory that nobody has written if its process is stopped and continued meanwhile, and
    its time has passed: so it is asked without waiting.
    """
    ends = time.monotonic() + wait_s
    while (found := signal.sigtimedwait(signals, 0)) is None and (left := ends - time.monotonic()) > 0:
        time.sleep(min(left, _LOOK_S))
    return found


@dataclass(frozen=True)
class _Failure:
    """Failure of an attempt."""

    reason: str
    may_pass: bool = True
    exit_code: int = 1
    out_of_memory: bool = False


class RunSupervisor:
    """Runs attempts at a run until it is done.

    Args:
        train: called in each child.
        say: prints a message.
    """

    def __init__(self, config: SupervisionConfig, train: Train, say: Callable[[str], None]) -> None:
        self._train, self._say = train, say
        self._run_dir: Path | None = None  # as the process that trains reports it
        self._config, self._budget = config, RestartBudget(config)
        self._grace_s = _GRACE_S if config.stall_s == "auto" else min(_GRACE_S, config.stall_s)
        self._reduction = MemoryReduction()
        self._signals, self._worked, self._begun = 0, False, False
        self._stall, self._kill_at = "", float("inf")
        self._lock = ExitStack()
        self._waited = [*ending_signals(), signal.SIGCHLD]
        self._mask: set[int] = set()
        self._holds_lock = False

    def run(self) -> dict[str, Any]:
        """Run to the end and return the summary.

        Raises:
            KeyboardInterrupt: the user asked to stop; a checkpoint is written if there was something to keep.
            RunFailedError: the run has failed, for good or once too often.
        """
        self._mask = set(signal.pthread_sigmask(signal.SIG_BLOCK, self._waited))
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if it is ignored, the child's exit status is lost
        try:
            with self._lock:
                while True:
                    summary, failure = self._attempt()
                    if failure is None:
                        return summary
                    self._prepare_restart(failure)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

    # -- one attempt ---------------------------------------------------------------------------------------------

    def _attempt(self) -> tuple[dict[str, Any], _Failure | None]:
        """Fork a process that trains, and wait for its end. Returns its summary, or its failure."""
        attempt = RunAttempt(self._run_dir if self._begun else None, self._holds_lock, self._reduction)
        reset_progress()
        killed_before = count_oom_kills()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):  # nobody takes the output; the run does not depend on it
                stream.flush()
        try:
            pid = os.fork()
        except OSError as error:
            attempt.close()
            return {}, _Failure(f"no process that trains could be started: {error.strerror}")
        if pid == 0:
            attempt.run(self._train, self._mask)
        self._stall, self._kill_at = "", float("inf")
        code = self._wait(pid, attempt)
        self._budget.reach(step_reached())
        self._worked |= has_worked()
        if (report := attempt.read("run_dir")) is not None:  # `_wait` misses what ends right after its begin
            self._run_dir, self._begun = Path(report["run_dir"]), True
        try:
            return self._judge(attempt, code, count_oom_kills() > killed_before)
        finally:
            attempt.close()

    def _wait(self, pid: int, attempt: RunAttempt) -> int:
        """Wait for the child's end, and return its exit code, or minus the signal that killed it."""
        watchdog, begun = StallWatchdog(pid, self._config.stall_limit(()), _LONGEST_LOOK_S), False
        while True:
            found = _wait_for_signal(self._waited, _TICK_S)
            if found is not None and found.si_signo != signal.SIGCHLD:
                self._pass_on(pid, found)
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status)
            if self._kill_at == float("inf") and attempt.read("outcome") is not None:
                self._kill_at = time.monotonic() + _LEAVING_S
            if not begun and (report := attempt.read("run_dir")) is not None:
                self._run_dir, begun = Path(report["run_dir"]), True
                watchdog = StallWatchdog(pid, report["stall_s"], _LONGEST_LOOK_S)
            if self._kill_at == float("inf") and watchdog.is_stalled():
                self._end_stalled(pid, attempt, watchdog.quiet_s)
            if time.monotonic() > self._kill_at:
                os.kill(pid, signal.SIGKILL)

    def _pass_on(self, pid: int, found: signal.struct_siginfo) -> None:
        """Send a signal to the child, which may have it already if it went to the whole group: `Interrupts` counts."""
        self._signals += 1
        if self._signals >= _ENDS_AT_ONCE:
            os.kill(pid, signal.SIGKILL)
        of_terminal = found.si_code > 0 and found.si_signo != signal.SIGHUP  # SIGHUP comes to the first process only
        if of_terminal and signals_passed_on() == 0:
            return  # the child has it, and would have to count only that
        pass_on_signal()
        os.kill(pid, found.si_signo)

    def _end_stalled(self, pid: int, attempt: RunAttempt, quiet_s: float) -> None:
        """Write down what a stalled child does, and end it: with a checkpoint if it can, else killed."""
        beat = self._heartbeat() if attempt.read("run_dir") is not None else None
        does = " while it was loading" if beat is None else f" while it was at `{beat.doing}`"
        waits = f", waiting for {beat.waits_for}" if beat is not None and beat.waits_for else ""
        stopped = "; its process is stopped" if psutil.Process(pid).status() == psutil.STATUS_STOPPED else ""
        reason = f"the run made no progress for {quiet_s:.0f} s{does}{waits}{stopped}"
        stacks = dump_stacks(pid, attempt.stacks)
        place = f"; it is in {where}" if (where := blocked_in(stacks)) else ""
        self._stall = reason + place
        if self._run_dir is not None:
            self._stall += write_stacks(self._run_dir, "stall", self._stall, stacks)
        end_for_restart()
        os.kill(pid, signal.SIGTERM)
        self._kill_at = time.monotonic() + self._grace_s

    # -- after an attempt ----------------------------------------------------------------------------------------

    def _judge(self, attempt: RunAttempt, code: int, oom_killed: bool) -> tuple[dict[str, Any], _Failure | None]:
        """Return the summary of a run that is done, or its failure. Raises KeyboardInterrupt if the user ended it."""
        outcome = attempt.outcome()
        if outcome is not None and outcome.status == "done":
            return outcome.summary, None
        if self._stall and not self._signals:
            return {}, _Failure(self._stall, may_pass=self._begun)
        if outcome is not None and outcome.status == "failed":
            passes = outcome.recoverable and (self._worked or outcome.out_of_memory) and not self._signals
            return {}, _Failure(outcome.message, passes, outcome.exit_code, outcome.out_of_memory)
        if outcome is not None or self._signals:
            raise KeyboardInterrupt
        if code >= 0:
            text = f"the process that trains exited with code {code} and without a result: users' code has ended it"
            return {}, _Failure(f"{text}; raise an exception that says what is wrong", may_pass=False)
        if sys.stdout.isatty():
            with suppress(OSError):  # the terminal was just closed
                sys.stdout.write("\x1b[?25h")  # the live view hides the cursor
                sys.stdout.flush()
        name = signal.Signals(-code).name
        memory = ": the kernel has killed it because memory ran out" if oom_killed and -code == signal.SIGKILL else ""
        text = f"the process that trains was killed by {name}{memory}"
        if self._run_dir is not None and self._begun:
            text += write_stacks(self._run_dir, "crash", text, read_stacks(attempt.stacks))
        return {}, _Failure(text, out_of_memory=bool(memory))

    def _prepare_restart(self, failure: _Failure) -> None:
        """Record a failure and wait before the next attempt. Raises RunFailedError if there is to be none."""
        if not failure.may_pass:
            raise RunFailedError(failure.reason, failure.exit_code)
        wait_s = self._budget.spend()
        resume = f"go on with: rollmill resume {self._run_dir}" if self._begun else "start it again"
        if wait_s is None:
            raise RunFailedError(f"{failure.reason}\n{self._budget.describe()}; {resume}", failure.exit_code)
        if failure.out_of_memory:
            self._reduction = self._reduction.further("" if self._run_dir is None else trainer_activity(self._run_dir))
        if self._begun and self._run_dir is not None:
            self._keep_run(self._run_dir, failure)
        count = f"restart {self._budget.used} of {self._budget.allowed}"
        start = "from its newest checkpoint" if self._begun else "from the beginning"
        self._say(f"{failure.reason}\nit starts again {start} in {wait_s:g} s ({count})")
        if _wait_for_signal([each for each in self._waited if each != signal.SIGCHLD], wait_s) is not None:
            self._say(f"interrupted; {resume}")
            raise KeyboardInterrupt

    def _keep_run(self, run_dir: Path, failure: _Failure) -> None:
        """Lock the run directory for later attempts, which inherit the lock, and record the restart.

        Raises RunFailedError if another process has taken the run in the meantime.
        """
        try:
            if not self._holds_lock:
                self._lock.enter_context(hold_run_lock(run_dir, wait_s=_LOCK_S))
                self._holds_lock = True
            record_event(run_dir, RESTART, step=self._budget.furthest, reason=failure.reason)
        except ConfigError as error:
            raise RunFailedError(f"{failure.reason}\nit does not start again: {error}", failure.exit_code) from error
        except RollmillError as error:  # the next attempt may find a directory that can be written, or says that not
            self._say(f"the restart is not recorded: {error}")

    def _heartbeat(self) -> HeartbeatRecord | None:
        """The last heartbeat of the process that trains."""
        beats = [] if self._run_dir is None else read_heartbeats(self._run_dir)
        return next((each for each in beats if each.name == TRAINER_PROCESS), None)
