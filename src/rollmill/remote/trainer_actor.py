"""Ray actor that trains under `placement: ray`: runs orchestrator, trainer, buffer and checkpoints for a supervisor."""

from __future__ import annotations

import asyncio
import faulthandler
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollmill.config.loader import load_run
from rollmill.config.placement import RayPlacement
from rollmill.errors import is_out_of_memory, is_recoverable
from rollmill.orchestrator.interrupt import Interrupts
from rollmill.orchestrator.memory_choice import with_kept_choice
from rollmill.orchestrator.setup import read_machine
from rollmill.progress import has_worked
from rollmill.remote.connection import portable_error
from rollmill.remote.ray_explorers import RayExplorers
from rollmill.supervision.attempt import REDUCED
from rollmill.supervision.memory import MemoryReduction
from rollmill.supervision.run_lock import TRAINER_LOCK, hold_run_lock
from rollmill.supervision.watchdog import StallWatchdog, blocked_in, memory_file, read_stacks, write_stacks
from rollmill.trackers.console import Stages
from rollmill.trackers.event_log import record_event
from rollmill.trackers.heartbeat import CONFIG
from rollmill.trackers.metrics_log import Metrics
from rollmill.types import Experience

_POLL_S, _LEAVING_S, _LONGEST_LOOK_S = 1.0, 60.0, 5.0


@dataclass(frozen=True)
class ViewCall:
    """A method call on the view, for the supervisor to make."""

    method: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class RunEnded:
    """End of a run: with a summary, interrupted, or with an error."""

    summary: dict[str, Any] | None = None
    error: BaseException | None = None
    may_pass: bool = False  #: the same run may succeed when it starts again
    out_of_memory: bool = False


@dataclass(frozen=True)
class RunStalled:
    """A run makes no progress, though its process answers."""

    reason: str


Event = ViewCall | RunEnded | RunStalled
Execute = Callable[..., dict[str, Any]]
"""`launch.execute`: runs a loaded run and returns its summary. Handed down, since launching also starts supervisors."""


class TrainerActor:
    """Runs a run, or the rest of it, in a thread, while its event loop answers the supervisor.

    Args:
        execute: trains in the process that calls it.
        explorers: actors by name; they outlive this one.
        ranks: how Ray starts the trainer's other ranks, which end with it.
        resumed: continue from the newest checkpoint, if there is one.
        shows_rollouts: the view needs experiences, too.
        reduction: smaller settings, after running out of memory.
    """

    def __init__(
        self,
        execute: Execute,
        run_dir: Path,
        explorers: dict[str, Any],
        ranks: Sequence[dict[str, Any]],
        *,
        resumed: bool,
        shows_rollouts: bool,
        reduction: MemoryReduction,
    ) -> None:
        self._execute, self._reduction = execute, reduction
        self._watchdog: StallWatchdog | None = None
        self._fleet: RayExplorers | None = None
        self._run_dir, self._explorers, self._ranks, self._resumed = run_dir, explorers, ranks, resumed
        self._view = _ForwardingView(shows_rollouts, self._put)
        self._interrupts = Interrupts()
        self._events: list[Event] = []
        self._news: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop

    async def start(self) -> int:
        """Start the run; return the process id."""
        self._loop, self._news = asyncio.get_running_loop(), asyncio.Event()
        threading.Thread(target=self._run, name="rollmill-run", daemon=True).start()
        return os.getpid()

    async def events(self) -> list[Event]:
        """Return events since the last call, after waiting up to a second for one. An answer shows that the process
        lives."""
        assert self._news is not None
        with suppress(TimeoutError):
            async with asyncio.timeout(_POLL_S):
                await self._news.wait()
        self._news.clear()
        if self._watchdog is not None and self._watchdog.is_stalled():
            self._events.append(RunStalled(self._describe_stall(self._watchdog.quiet_s)))
            self._watchdog = None
        events, self._events = self._events, []
        return events

    async def interrupt(self) -> bool:
        """Stop with a checkpoint; False while it still loads and there is nothing to keep."""
        return self._interrupts.request()

    async def use_explorers(self, explorers: dict[str, Any]) -> str | None:
        """Use these explorers from now on, in place of others. Returns like RayExplorers.use, and None while the run
        still loads."""
        return None if self._fleet is None else await self._fleet.use(explorers)

    def _describe_stall(self, quiet_s: float) -> str:
        """Write the stacks of all threads to a file, and name it and users' code in it."""
        with memory_file() as file:
            faulthandler.dump_traceback(file)
            stacks = read_stacks(file)
        where = blocked_in(stacks)
        reason = f"made no progress for {quiet_s:.0f} s" + (f"; it is in {where}" if where else "")
        return reason + write_stacks(self._run_dir, "stall", f"the trainer {reason}", stacks)

    def _run(self) -> None:
        self._put(self._ended())

    def _ended(self) -> RunEnded:
        try:
            loaded = load_run(self._run_dir / CONFIG, out=self._run_dir)
            assert isinstance(loaded.config.placement, RayPlacement)
            explorers = self._fleet = RayExplorers(
                loaded.config.placement, self._run_dir, self._explorers, loaded.config.explorer_silent_s
            )
            limit_s = loaded.config.supervise.stall_limit(loaded.stages)
            if self._reduction != MemoryReduction():  # it halves what an earlier attempt has chosen
                loaded = with_kept_choice(loaded, read_machine(self._run_dir))
            loaded, changes = self._reduction.apply(loaded)
            if changes:
                record_event(self._run_dir, REDUCED, changes=changes)
            self._watchdog = StallWatchdog(os.getpid(), limit_s, _LONGEST_LOOK_S)
            # the trainer of a killed command may still be ending
            with hold_run_lock(self._run_dir, TRAINER_LOCK, _LEAVING_S):
                return RunEnded(
                    self._execute(
                        loaded,
                        self._run_dir,
                        self._view,
                        resumed=self._resumed,
                        explorers=explorers,
                        ranks=self._ranks,
                        interrupts=self._interrupts,
                        notes=[f"after running out of memory: {change}" for change in changes],
                    )
                )
        except KeyboardInterrupt:
            return RunEnded()
        except BaseException as error:
            passes = is_recoverable(error) and (has_worked() or is_out_of_memory(error))
            raised = portable_error(error, "the process that trains")
            return RunEnded(error=raised, may_pass=passes, out_of_memory=is_out_of_memory(error))

    def _put(self, event: Event) -> None:
        self._loop.call_soon_threadsafe(self._add, event)

    def _add(self, event: Event) -> None:
        assert self._news is not None
        self._events.append(event)
        self._news.set()


class _ForwardingView:
    """View of the training process: forwards all calls to the supervisor, which has the terminal."""

    def __init__(self, shows_rollouts: bool, put: Any) -> None:
        self._shows_rollouts, self._put = shows_rollouts, put

    def start(self, run_name: str, stages: Stages) -> None:
        self._put(ViewCall("start", (run_name, list(stages))))

    def resume(self, history: Sequence[Metrics]) -> None:
        self._put(ViewCall("resume", (list(history),)))

    def message(self, text: str) -> None:
        self._put(ViewCall("message", (text,)))

    def step(self, metrics: Metrics, experiences: Sequence[Experience]) -> None:
        self._put(ViewCall("step", (dict(metrics), list(experiences) if self._shows_rollouts else [])))

    def evaluation(self, metrics: Metrics) -> None:
        self._put(ViewCall("evaluation", (dict(metrics),)))

    def close(self) -> None:
        """Nothing to do: the supervisor closes its own view."""
