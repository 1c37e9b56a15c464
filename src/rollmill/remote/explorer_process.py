"""An explorer as a process of its own: it joins a run whose trainer is another process, until the run is done."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from rollmill.config.loader import LoadedRun, load_run
from rollmill.config.placement import ExplorerSpec
from rollmill.errors import ConfigError, RollmillError
from rollmill.orchestrator.setup import read_run_id, set_up_run
from rollmill.remote.connection import LOST, join_trainer, serve_calls
from rollmill.remote.explorer_worker import ExplorerWorker
from rollmill.remote.run_state import EXPLORER, TrainerStatus, TrainerWatch, acquire_worker_number, read_trainer_status
from rollmill.remote.stage_worker import WorkerSetup
from rollmill.trackers.event_log import INCIDENT, record_event
from rollmill.trackers.heartbeat import CONFIG, HeartbeatWriter, keep_heartbeat
from rollmill.waiting import OUTAGES

WAIT_S = 0.2
KEYS_OF_EXPLORERS = ("mode", "await_trainer", "device", "threads", "trainer_away_s", "explorer_silent_s", "supervise")
"""Keys that may differ between explorers and the trainer."""
_CONNECT_S, _HANDSHAKE_S = 5.0, 60.0
Report = Callable[[str], None]
Found = TypeVar("Found")


def run_explorer(loaded: LoadedRun, run_dir: Path, report: Report = print) -> dict[str, Any]:
    """Join a run as an explorer until it is done, or needs fewer explorers; returns its number and count of groups, for
    JSON.

    Raises:
        ConfigError: the run's file is another one, or another run was started in the directory.
        DeadlineError: no heartbeat of the trainer for `trainer_away_s`.
        RollmillError: this process cannot do the work of the run.
        KeyboardInterrupt: the user stopped it; started again, it joins again.
    """
    watch = TrainerWatch(run_dir, "the explorer", loaded.config.trainer_away_s)
    try:
        return asyncio.run(_join(loaded, run_dir, watch, report))
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


async def _join(loaded: LoadedRun, run_dir: Path, watch: TrainerWatch, report: Report) -> dict[str, Any]:
    status = await _wait_for(lambda: _find_run(run_dir), watch)
    require_same_config(loaded, run_dir)
    with (
        acquire_worker_number(run_dir) as number,
        keep_heartbeat(run_dir, f"{EXPLORER} {number}") as heartbeat,
    ):
        tell = partial(_tell, run_dir, f"{EXPLORER} {number}", report)
        groups, why = 0, ""
        with OUTAGES.listening(tell):
            if not status.done:
                groups, why = await _serve_run(loaded, run_dir, number, watch, heartbeat, report)
    report(f"{EXPLORER} {number}: {why or 'the run is done'}; {groups} groups were rolled out")
    return {"explorer": number, "groups": groups}


def _tell(run_dir: Path, process: str, report: Report, text: str) -> None:
    """Report a failure that does not end the run, and record it."""
    report(f"{process}: {text}")
    try:
        record_event(run_dir, INCIDENT, process=process, text=text)
    except RollmillError as error:
        report(f"{process}: this is not recorded: {error}")


async def _serve_run(
    loaded: LoadedRun, run_dir: Path, number: int, watch: TrainerWatch, heartbeat: HeartbeatWriter, report: Report
) -> tuple[int, str]:
    """Serve one trainer after the other until the run is done, or needs this explorer no more; returns how many groups
    were rolled out, and why it is not needed."""
    setup = set_up_run(loaded, run_dir, None, joined=True, trains=False)
    report(f"{EXPLORER} {number}: {setup.describe(run_dir)}")

    def localize(stage: WorkerSetup) -> WorkerSetup:
        address = str(run_dir.absolute() / stage.weights_address)
        here = {"weights_address": address, "folder": run_dir / stage.folder, "name": f"{EXPLORER} {number}"}
        return replace(stage, policy=setup.policy, threads=setup.threads, plugins=[], **here)  # type: ignore[arg-type]

    worker = ExplorerWorker(heartbeat, ExplorerSpec(), localize)
    while (trainer := _read_status(run_dir, setup.run_id)) is None or not trainer.done:
        watch.check()
        if trainer is None:  # somebody has removed the file; the trainer writes it again
            await asyncio.sleep(WAIT_S)
            continue
        serving = asyncio.ensure_future(_serve_trainer(trainer, number, worker))
        try:
            while not serving.done() and _read_status(run_dir, setup.run_id) in (trainer, None):
                watch.check()
                await asyncio.wait([serving], timeout=WAIT_S)
            if serving.done():
                serving.result()  # raises what keeps this process from the work
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
            await worker.end("")
        if worker.dismissed:
            break
        await asyncio.sleep(WAIT_S)
    return worker.groups, worker.dismissed


async def _serve_trainer(trainer: TrainerStatus, number: int, worker: ExplorerWorker) -> None:
    """Connect to a trainer and serve it until the connection ends; returns at once if it cannot be reached."""
    here = ("localhost",) if trainer.host == socket.gethostname() else ()
    for address in (*here, *trainer.addresses):
        try:
            async with asyncio.timeout(_CONNECT_S):
                reader, writer = await asyncio.open_connection(address, trainer.port)
        except OSError:  # TimeoutError, too
            continue
        try:
            async with asyncio.timeout(_HANDSHAKE_S):
                await join_trainer(reader, writer, bytes.fromhex(trainer.key), number)
            failure = await serve_calls(reader, writer, worker)
        except LOST:
            continue
        finally:
            writer.transport.abort()
        if failure is not None:
            raise failure
        return


def _find_run(run_dir: Path) -> TrainerStatus | None:
    """The trainer's status, once it is one of the run in this directory."""
    status = read_trainer_status(run_dir)
    if status is None or not (run_dir / CONFIG).is_file():
        return None
    return status if status.run_id == read_run_id(run_dir) else None


def _read_status(run_dir: Path, run_id: str) -> TrainerStatus | None:
    status = read_trainer_status(run_dir)
    if status is not None and status.run_id != run_id:
        raise ConfigError(f"another run was started in {run_dir}; start this explorer again to join it")
    return status


async def _wait_for(look: Callable[[], Found | None], watch: TrainerWatch) -> Found:
    """Return the result of `look` once there is one. Raises DeadlineError if the trainer is silent for too long."""
    while (found := look()) is None:
        watch.check()
        await asyncio.sleep(WAIT_S)
    return found


def require_same_config(loaded: LoadedRun, run_dir: Path) -> None:
    """Raise ConfigError unless the run has the same run file, apart from KEYS_OF_EXPLORERS; names differing keys."""
    mine, its = loaded.resolved(), load_run(run_dir / CONFIG, out=run_dir).resolved()
    differing = [key for key in _differences(mine, its) if key not in KEYS_OF_EXPLORERS]
    if its["mode"] != "train":
        raise ConfigError(f"{run_dir} holds a run of mode `{its['mode']}`; explorers join runs of mode `train`")
    if differing:
        raise ConfigError(
            f"{loaded.path} differs from the run in {run_dir} in {', '.join(differing[:5])}; join with the run's own "
            f"file: rollmill run {run_dir / CONFIG} --set mode=explore --out {run_dir}"
        )


def _differences(one: Any, other: Any, at: str = "") -> list[str]:
    """Dotted keys in which two trees differ."""
    if isinstance(one, dict) and isinstance(other, dict):
        keys = dict.fromkeys([*one, *other])
        found = (_differences(one.get(key), other.get(key), f"{at}.{key}".lstrip(".")) for key in keys)
        return [key for each in found for key in each]
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        found = (_differences(*pair, f"{at}.{n}") for n, pair in enumerate(zip(one, other, strict=True)))
        return [key for each in found for key in each]
    return [] if one == other else [at]
