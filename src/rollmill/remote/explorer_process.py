"""An explorer as a process of its own: it joins a run whose trainer is another process, and stays until it is done."""

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
"""What explorers need not have in common with the trainer."""
Say = Callable[[str], None]
Found = TypeVar("Found")


def run_explorer(loaded: LoadedRun, run_dir: Path, say: Say = print) -> dict[str, Any]:
    """Join a run as an explorer, until it is done; what was made, as JSON can hold it.

    Raises:
        ConfigError: the run's file is another one, or another run was started in the directory.
        DeadlineError: the trainer says nothing for `trainer_away_s`.
        RollmillError: a rollout failed.
        KeyboardInterrupt: the user ended it; started again, it goes on.
    """
    watch = TrainerWatch(run_dir, "the explorer", loaded.config.trainer_away_s)
    try:
        return asyncio.run(_join(loaded, run_dir, watch, say))
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


async def _join(loaded: LoadedRun, run_dir: Path, watch: TrainerWatch, say: Say) -> dict[str, Any]:
    notice = await _wait_for(lambda: _find_run(run_dir), watch)
    require_same_config(loaded, run_dir)
    with acquire_worker_slot(run_dir) as own, keep_heartbeat(run_dir, f"{EXPLORER} {own.number}") as heart:
        put = 0 if notice.done else await _run_stages(loaded, own, watch, heart, say)
    say(f"{EXPLORER} {own.number}: the run is done; {put} groups were put into its buffer")
    return {"explorer": own.number, "groups": put}


async def _run_stages(loaded: LoadedRun, own: WorkerSlot, watch: TrainerWatch, heart: HeartbeatWriter, say: Say) -> int:
    """Stage after stage, as the trainer goes; how many groups were put."""
    run_dir, config, put = own.run_dir, loaded.config, 0
    setup = set_up_run(loaded, run_dir, None, joined=True)
    say(f"{EXPLORER} {own.number}: {setup.describe(run_dir)}")
    buffers = Buffers(run_dir, setup.run_id, shared=True)
    context = RunContext(run_dir, setup.run_id, config.seed, setup.precision, setup.threads, buffers, config.plugins)
    try:
        while not (notice := _read_status(run_dir, setup.run_id)).done:
            stage = loaded.stages[notice.stage]
            if not (stage.algorithm.uses_rollouts or stage.evaluation is not None):
                heart.set_activity(f"stage {stage.name}", "its end: nothing is rolled out")
                await _wait_while(lambda: _read_status(run_dir, setup.run_id) == notice, watch)
                continue
            say(f"{EXPLORER} {own.number}: stage {stage.name}")
            tasks = setup.tasks[notice.stage]
            running = ExplorerStage(stage, setup.policy, tasks, context, notice=notice, place=own, heart=heart)
            try:
                while _read_status(run_dir, setup.run_id) == notice:
                    watch.check()
                    await running.turn()
            finally:
                put += running.put
                await running.close()
    finally:
        buffers.close()
    return put


def _find_run(run_dir: Path) -> TrainerStatus | None:
    """The trainer's notice, once it says so in this directory."""
    notice = read_trainer_status(run_dir)
    if notice is None or not (run_dir / CONFIG).is_file() or not (run_dir / MACHINE).is_file():
        return None
    return notice if notice.run_id == json.loads((run_dir / MACHINE).read_text())["run_id"] else None


def _read_status(run_dir: Path, run_id: str) -> TrainerStatus:
    notice = read_trainer_status(run_dir)
    if notice is None or notice.run_id != run_id:
        raise ConfigError(f"another run was started in {run_dir}; start this explorer again to join it")
    return notice


async def _wait_for(look: Callable[[], Found | None], watch: TrainerWatch) -> Found:
    """What `look` finds, once it does. Raises DeadlineError where the trainer says nothing for too long."""
    while (found := look()) is None:
        watch.check()
        await asyncio.sleep(WAIT_S)
    return found


async def _wait_while(holds: Callable[[], bool], watch: TrainerWatch) -> None:
    """Wait as long as something holds. Raises like `_wait_for`."""
    while holds():
        watch.check()
        await asyncio.sleep(WAIT_S)


def require_same_config(loaded: LoadedRun, run_dir: Path) -> None:
    """Raises ConfigError unless the run has the same run file, but for the keys in OWN; names those that differ."""
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
    """Keys, with dots, in which two trees differ."""
    if isinstance(one, dict) and isinstance(other, dict):
        keys = dict.fromkeys([*one, *other])
        found = (_differences(one.get(key), other.get(key), f"{at}.{key}".lstrip(".")) for key in keys)
        return [key for each in found for key in each]
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        found = (_differences(*pair, f"{at}.{n}") for n, pair in enumerate(zip(one, other, strict=True)))
        return [key for each in found for key in each]
    return [] if one == other else [at]
