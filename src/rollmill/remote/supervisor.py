"""Implements `rollmill run` under `placement: ray`: starts explorers and trainer, shows the run, restarts the trainer.

Ray restarts explorers.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from rollmill.config.loader import LoadedRun
from rollmill.config.placement import RayPlacement
from rollmill.errors import RollmillError, TrainerRankLostError, TrainingError, count_oom_kills
from rollmill.orchestrator.checkpoint import Checkpoints
from rollmill.orchestrator.interrupt import Interrupts
from rollmill.orchestrator.setup import read_run_id
from rollmill.orchestrator.summary import summarise_complete_run
from rollmill.plugins import call_hook
from rollmill.ray_session import abandon_ray, join, ray_module
from rollmill.remote.placement_group import PlacementGroup, ResourceRequest
from rollmill.remote.ray_scaling import ExplorerActors, ExplorerScaling, explorer_needs, number_of_explorers
from rollmill.remote.rollouts import remove_stale_weights
from rollmill.remote.trainer_actor import Execute, RunEnded, RunStalled, TrainerActor, ViewCall
from rollmill.remote.worker_pool import SHUTDOWN_S, START_S
from rollmill.supervision.budget import RestartBudget
from rollmill.supervision.memory import MemoryReduction
from rollmill.trackers.event_log import RESTART, record_event
from rollmill.trackers.heartbeat import trainer_activity
from rollmill.trackers.metrics_log import write_summary
from rollmill.trackers.run_views import PlainView, RunView, make_view
from rollmill.waiting import wait_with_grace

_POLL_S, _TRIES = 5.0, 5


def supervise(
    loaded: LoadedRun, run_dir: Path, view: RunView | None, execute: Execute, *, resumed: bool
) -> dict[str, Any]:
    """Run the remaining steps of a run on Ray and return the summary; see `run`. `execute` runs in its trainer."""
    placement = loaded.config.placement
    assert isinstance(placement, RayPlacement)
    address = join(placement.address)
    ranks = max(stage.trainer.ranks for stage in loaded.stages)
    count = number_of_explorers(placement, run_dir)
    needs = [
        *explorer_needs(placement, count),
        *[ResourceRequest(placement.trainer_cpus, placement.trainer_gpus)] * ranks,
    ]
    view = view or make_view(loaded.config.monitor.show_completions)
    with closing(PlacementGroup(needs, one_host=placement.weights == "memory")) as group:
        explorers = ExplorerActors(placement, group, run_dir.absolute(), count)
        supervisor = Supervisor(loaded, run_dir.absolute(), group, explorers, view, address, execute)
        try:
            return asyncio.run(supervisor.run(resumed))
        finally:
            supervisor.end()


class Supervisor:
    """Watches a run's actors, which end with this process. A trainer that dies or does not answer is restarted from its
    newest checkpoint; explorers continue meanwhile.

    Args:
        group: the placement group with a bundle for each explorer and for each of the trainer's ranks.
    """

    def __init__(
        self,
        loaded: LoadedRun,
        run_dir: Path,
        group: PlacementGroup,
        explorers: ExplorerActors,
        view: RunView,
        address: str,
        execute: Execute,
    ) -> None:
        self._address, self._execute = address, execute  # address: of Ray's control service
        placement = loaded.config.placement
        assert isinstance(placement, RayPlacement)
        self._loaded, self._placement = loaded, placement
        self._run_dir, self._group, self._view = run_dir, group, view
        self._explorers = explorers
        self._trainer: Any = None
        self._started = False  # the trainer's process
        self._killed_before = 0
        self._budget, self._reduction = RestartBudget(loaded.config.supervise), MemoryReduction()
        self._interrupts = Interrupts()

    async def run(self, resumed: bool) -> dict[str, Any]:
        """Run to the end and return the summary.

        Raises:
            KeyboardInterrupt: the user asked to stop, and a checkpoint is written or there was nothing to keep.
            TrainingError: the trainer kept dying.
            BaseException: whatever the run raised.
        """
        with self._interrupts.installed():
            scaling = ExplorerScaling(self._run_dir, self._explorers, lambda: self._trainer, self._view.message)
            scaled = asyncio.ensure_future(scaling.run())
            try:
                return await self._lives(resumed)
            finally:
                scaled.cancel()
                self._view.close()
                task = asyncio.current_task()
                # a second signal stops at once
                if task is not None and not task.cancelling() and await asyncio.to_thread(self._ray_lives):
                    await self._close()

    async def _lives(self, resumed: bool) -> dict[str, Any]:
        while True:
            try:
                return await self._run_trainer(resumed)
            except _TrainerLostError as gone:
                await self._clear_up(gone)
                resumed = True

    async def _run_trainer(self, resumed: bool) -> dict[str, Any]:
        """Run one trainer process. Raises _TrainerLostError if it ends before the run does."""
        made = ray_module().remote(TrainerActor)
        options, *ranks = map(self._group.options, range(self._explorers.reserved, len(self._group)))
        shows, self._killed_before = not isinstance(self._view, PlainView), count_oom_kills()
        self._trainer = made.options(max_restarts=0, max_concurrency=100, **options).remote(
            self._execute,
            self._run_dir,
            self._explorers.used,
            ranks,
            resumed=resumed,
            shows_rollouts=shows,
            reduction=self._reduction,
        )
        followed = asyncio.ensure_future(self._follow())
        signalled = asyncio.ensure_future(self._interrupts.wait())
        hosts_gone = asyncio.ensure_future(_ray_has_died(self._address))
        try:
            await asyncio.wait([followed, signalled, hosts_gone], return_when=asyncio.FIRST_COMPLETED)
            if await self._has_lost_ray(followed, hosts_gone):
                abandon_ray()  # what is left of it answers no call, and would end this process after a minute
                return self._finish_without_ray()
            if not followed.done() and not await self._end_requested():
                raise KeyboardInterrupt
            return _outcome(await followed)
        finally:
            for pending in (signalled, followed, hosts_gone):
                pending.cancel()

    async def _has_lost_ray(self, followed: asyncio.Future[RunEnded], hosts_gone: asyncio.Future[None]) -> bool:
        """True if Ray has died, which may show first in a trainer that does not answer."""
        if not followed.done():
            return hosts_gone.done()
        lost = (_TrainerLostError, TrainerRankLostError, ray_module().exceptions.RayError, ConnectionError)
        error, may_pass = followed.exception(), False
        if error is None:
            error, may_pass = followed.result().error, followed.result().may_pass
        return (may_pass or isinstance(error, lost)) and not await asyncio.to_thread(_answers, self._address)

    async def _follow(self) -> RunEnded:
        """Show the trainer's events until the run ends; return how it ended."""
        self._started = False
        await self._answer(self._trainer.start.remote(), START_S)
        self._started = True
        while True:
            for event in await self._answer(self._trainer.events.remote(), self._placement.health_s):
                if isinstance(event, RunEnded):
                    return event
                if isinstance(event, RunStalled):
                    raise _TrainerLostError(event.reason)
                self._show(event)

    async def _end_requested(self) -> bool:
        """Ask the trainer to stop; False if it has nothing to keep yet."""
        try:
            return self._started and await self._answer(self._trainer.interrupt.remote(), self._placement.health_s)
        except _TrainerLostError:
            return True  # `_follow` raises it

    async def _answer(self, reference: Any, deadline_s: float) -> Any:
        """Await the trainer's answer. Raises _TrainerLostError if it has died, or does not answer in time."""
        try:
            return await wait_with_grace(reference, deadline_s)
        except TimeoutError:
            raise _TrainerLostError(f"did not answer for {deadline_s:g} s") from None
        except ray_module().exceptions.OutOfMemoryError as error:
            why = str(error).strip().splitlines()[0]
            raise _TrainerLostError("was ended by Ray because memory ran out", why, out_of_memory=True) from None
        except ray_module().exceptions.RayActorError as error:
            memory = count_oom_kills() > self._killed_before  # on this host, which most runs have alone
            how = "died, and the kernel has killed a process because memory ran out" if memory else "died"
            raise _TrainerLostError(how, str(error).strip().splitlines()[-1], out_of_memory=memory) from None

    def _show(self, event: ViewCall) -> None:
        getattr(self._view, event.method)(*event.arguments)
        if event.method == "step":
            self._budget.reach(int(event.arguments[0]["step"]))

    def _finish_without_ray(self) -> dict[str, Any]:
        """Return the summary of a run whose steps were all made when Ray died: its last checkpoint has everything.

        Raises TrainingError if something is left to do.
        """
        stages = self._loaded.stages
        summary = summarise_complete_run(Checkpoints(self._run_dir), stages)
        if summary is None:
            total = sum(stage.steps for stage in stages)
            reached = f"Ray has died after step {self._budget.furthest} of {total}"
            raise TrainingError(f"{reached}; go on with: rollmill resume {self._run_dir}")
        self._view.message("Ray has died after the last step; the run is complete")
        write_summary(self._run_dir, summary)
        if self._loaded.config.monitor.report:
            call_hook("write_run_report", self._run_dir)
        return summary

    async def _clear_up(self, gone: _TrainerLostError) -> None:
        """Clean up after a lost trainer, before its restart. Raises TrainingError if it may not be restarted."""
        self._kill_trainer()
        how = str(gone)
        again = f"go on with: rollmill resume {self._run_dir}"
        if self._interrupts.requested:
            self._view.message(f"interrupted, but the trainer {how} before it had written a checkpoint; {again}")
            raise KeyboardInterrupt
        wait_s = self._budget.spend()
        if wait_s is None:
            text = f"the trainer {how}. {self._budget.describe()}"
            advice = "Its log is in Ray's session folder; raise supervise.restarts to try more often"
            raise TrainingError(". ".join(filter(None, [text, gone.why.rstrip("."), f"{advice}, or {again}"])))
        if gone.out_of_memory:
            self._reduction = self._reduction.further(trainer_activity(self._run_dir))
        reason = ": ".join(filter(None, [f"the trainer {how}", gone.why]))
        try:
            record_event(self._run_dir, RESTART, step=self._budget.furthest, reason=reason)
        except RollmillError as error:
            self._view.message(f"the restart is not recorded: {error}")
        self._view.message(f"the trainer {how}; it is started again from the newest checkpoint, explorers go on")
        with suppress(TimeoutError):
            await asyncio.wait_for(self._interrupts.wait(), wait_s)
            raise KeyboardInterrupt
        for explorer in self._explorers.all:
            explorer.end.remote("")  # drop the dead trainer's requests

    async def _close(self) -> None:
        """Let explorers free their resources."""
        calls = [_awaited(each.close.remote()) for each in self._explorers.all]
        with suppress(TimeoutError):
            async with asyncio.timeout(SHUTDOWN_S):
                await asyncio.gather(*calls, return_exceptions=True)

    def _kill_trainer(self) -> None:
        if self._trainer is not None:
            ray_module().kill(self._trainer)
            self._trainer = None

    def _ray_lives(self) -> bool:
        """False if Ray has died or was left: any call would wait for a minute, and then end this process."""
        return ray_module().is_initialized() and _answers(self._address)

    def end(self) -> None:
        """Kill all actors, or leave a Ray that has died."""
        if self._ray_lives():
            self._kill_trainer()
            for explorer in self._explorers.all:
                ray_module().kill(explorer)
        else:
            abandon_ray()
        if (run_id := read_run_id(self._run_dir)) is not None:  # a killed trainer leaves its weights
            remove_stale_weights(run_id)


def _outcome(ended: RunEnded) -> dict[str, Any]:
    """Return the summary; else raise what the run raised."""
    if isinstance(ended.error, TrainerRankLostError):
        raise _TrainerLostError("lost a rank", str(ended.error), out_of_memory=ended.out_of_memory)
    if ended.error is not None and ended.may_pass:
        raise _TrainerLostError("failed", str(ended.error), out_of_memory=ended.out_of_memory)
    if ended.error is not None:
        raise ended.error
    if ended.summary is None:
        raise KeyboardInterrupt
    return ended.summary


class _TrainerLostError(Exception):
    """The trainer is gone; `why`, as far as Ray knows."""

    def __init__(self, how: str, why: str = "", *, out_of_memory: bool = False) -> None:
        super().__init__(how)
        self.why, self.out_of_memory = why, out_of_memory


async def _ray_has_died(address: str) -> None:
    """Wait until Ray's control service at `address` is gone, or all hosts are, so that nothing could be restarted."""
    while await asyncio.to_thread(_answers, address):
        nodes: list[dict[str, Any]] = []
        # a call to a service that has just died waits for a minute, and the end of the event loop for its own threads
        threading.Thread(target=_list_nodes, args=(nodes,), daemon=True).start()
        await asyncio.sleep(_POLL_S)
        if nodes and not any(node["Alive"] for node in nodes):
            return


def _list_nodes(found: list[dict[str, Any]]) -> None:
    with suppress(ray_module().exceptions.RayError, ConnectionError):  # `_answers` says what is wrong
        found.extend(ray_module().nodes())


def _answers(address: str) -> bool:
    """True unless a service refuses connections several times; a call to one that is dead would wait for a minute."""
    host, _, port = address.rpartition(":")
    for _ in range(_TRIES):
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=_POLL_S).close()
            return True
        except TimeoutError:
            return True
        except OSError:
            time.sleep(_POLL_S / _TRIES)
    return False


async def _awaited(reference: Any) -> Any:
    return await reference
