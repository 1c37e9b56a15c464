"""An explorer as a separate process: it joins a run whose trainer is another process, until the run is done."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from rollmill.config.loader import LoadedRun, load_run
from rollmill.errors import ConfigError
from rollmill.launch import CONFIG
from rollmill.orchestrator.buffers import Buffers
from rollmill.orchestrator.context import RunContext
from rollmill.orchestrator.setup import MACHINE, set_up_run
from rollmill.remote.explorer_stage import ExplorerStage
from rollmill.remote.run_state import EXPLORER, TrainerStatus, TrainerWatch, read_trainer_status
from rollmill.remote.worker_slots import WorkerSlot, acquire_worker_slot
from rollmill.trackers.heartbeat import HeartbeatWriter, keep_heartbeat

WAIT_S = 0.2
KEYS_OF_EXPLORERS = ("mode", "device", "threads", "trainer_away_s")
"""Keys that may differ between explorers and the trainer."""
Say = Callable[[str], None]
Found = TypeVar("Found")


def run_explorer(loaded: LoadedRun, run_dir: Path, say: Say = print) -> dict[str, Any]:
    """Join a run as an explorer until it is done; returns its number and count of groups, for JSON.

    Raises:
        ConfigError: the run's file is another one, or another run was started in the directory.
        DeadlineError: no heartbeat of the trainer for `trainer_away_s`.
        RollmillError: a rollout failed.
        KeyboardInterrupt: the user stopped it; started again, it continues.
    """
    watch = TrainerWatch(run_dir, "the explorer", loaded.config.trainer_away_s)
    try:
        return asyncio.run(_join(loaded, run_dir, watch, say))
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


async def _join(loaded: LoadedRun, run_dir: Path, watch: TrainerWatch, say: Say) -> dict[str, Any]:
    status = await _wait_for(lambda: _find_run(run_dir), watch)
    require_same_config(loaded, run_dir)
    with acquire_worker_slot(run_dir) as slot, keep_heartbeat(run_dir, f"{EXPLORER} {slot.number}") as heartbeat:
        put = 0 if status.done else await _run_stages(loaded, slot, watch, heartbeat, say)
    say(f"{EXPLORER} {slot.number}: the run is done; {put} groups were put into its buffer")
    return {"explorer": slot.number, "groups": put}


async def _run_stages(
    loaded: LoadedRun, slot: WorkerSlot, watch: TrainerWatch, heartbeat: HeartbeatWriter, say: Say
) -> int:
    """Run stage after stage, following the trainer; returns how many groups were put into the buffer."""
    run_dir, config, put = slot.run_dir, loaded.config, 0
    setup = set_up_run(loaded, run_dir, None, joined=True)
    say(f"{EXPLORER} {slot.number}: {setup.describe(run_dir)}")
    buffers = Buffers(run_dir, setup.run_id, shared=True)
    context = RunContext(run_dir, setup.run_id, config.seed, setup.precision, setup.threads, buffers, config.plugins)
    try:
        while not (status := _read_status(run_dir, setup.run_id)).done:
            stage = loaded.stages[status.stage]
            if not (stage.algorithm.uses_rollouts or stage.evaluation is not None):
                heartbeat.set_activity(f"stage {stage.name}", "its end: nothing is rolled out")
                await _wait_while(lambda: _read_status(run_dir, setup.run_id) == status, watch)
                continue
            say(f"{EXPLORER} {slot.number}: stage {stage.name}")
            tasks = setup.tasks[status.stage]
            running = ExplorerStage(stage, setup.policy, tasks, context, status=status, slot=slot, heartbeat=heartbeat)
            try:
                while _read_status(run_dir, setup.run_id) == status:
                    watch.check()
                    await running.turn()
            finally:
                put += running.put
                await running.close()
    finally:
        buffers.close()
    return put


def _find_run(run_dir: Path) -> TrainerStatus | None:
    """The trainer's status, once it is one of the run in this directory."""
    status = read_trainer_status(run_dir)
    if status is None or not (run_dir / CONFIG).is_file() or not (run_dir / MACHINE).is_file():
        return None
    return status if status.run_id == json.loads((run_dir / MACHINE).read_text())["run_id"] else None


def _read_status(run_dir: Path, run_id: str) -> TrainerStatus:
    status = read_trainer_status(run_dir)
    if status is None or status.run_id != run_id:
        raise ConfigError(f"another run was started in {run_dir}; start this explorer again to join it")
    return status


async def _wait_for(look: Callable[[], Found | None], watch: TrainerWatch) -> Found:
    """Return the result of `look` once there is one. Raises DeadlineError if the trainer is silent for too long."""
    while (found := look()) is None:
        watch.check()
        await asyncio.sleep(WAIT_S)
    return found


async def _wait_while(holds: Callable[[], bool], watch: TrainerWatch) -> None:
    """Wait while `holds` returns True. Raises like `_wait_for`."""
    while holds():
        watch.check()
        await asyncio.sleep(WAIT_S)


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
