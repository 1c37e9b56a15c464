"""Rollouts without a trainer: they fill the buffer of a run directory, at the weights of the run file's model.

A trainer that starts there later learns from them, as from groups that were imported.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollmill.buffer import ExperienceKind, ExperienceStore, Group
from rollmill.buffer.offline_data import RatingOverrides
from rollmill.buffer.parquet import imported_group
from rollmill.config.loader import LoadedRun
from rollmill.config.run import StageConfig
from rollmill.errors import ConfigError
from rollmill.files import atomic_write, read_json_object
from rollmill.models.load import PolicyModel
from rollmill.orchestrator.batches import RolloutBatches
from rollmill.orchestrator.buffers import Buffers
from rollmill.orchestrator.checkpoint import Checkpoints
from rollmill.orchestrator.components import build_rollout_components, build_stage_pipeline, build_stage_rewards
from rollmill.orchestrator.rollouts import LocalRollouts
from rollmill.orchestrator.setup import set_up_run
from rollmill.orchestrator.task_selection import StageTasks
from rollmill.pipelines import Pipeline
from rollmill.rewards.resources import close_warm_pools
from rollmill.seeds import derive_seed
from rollmill.supervision.run_lock import hold_run_lock
from rollmill.trackers.heartbeat import keep_heartbeat
from rollmill.trackers.metrics_log import read_metrics
from rollmill.trackers.trace import Trace
from rollmill.types import Experience

EXPLORED = "explored.json"
"""File of a run directory whose buffer was filled without a trainer: the number of groups."""
_PROCESS = "explorer 0"


def count_explored(run_dir: Path) -> int:
    """Number of groups that were rolled out in a run directory without a trainer.

    Raises ConfigError if the file that says so is damaged.
    """
    path = run_dir / EXPLORED
    if not path.is_file():
        return 0
    try:
        return int(read_json_object(path)["groups"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is damaged: {error}; remove it, and explore again") from error


def explore_alone(loaded: LoadedRun, run_dir: Path, report: Callable[[str], None] = print) -> dict[str, Any]:
    """Roll out all steps of the run file's stage, and leave the groups in the buffer; returns their number, for JSON.

    Raises:
        ConfigError: the run directory holds a run.
        RollmillError: a rollout, a reward or the pipeline failed; the groups of earlier steps stay.
        KeyboardInterrupt: the user stopped it; so do those of finished steps.
    """
    with hold_run_lock(run_dir):
        if count_explored(run_dir) or Checkpoints(run_dir).steps() or read_metrics(run_dir):
            raise ConfigError(f"{run_dir} holds a run, or groups of one; choose another folder with --out")
        atomic_write(run_dir / "config.yaml", loaded.to_yaml().encode(), durable=True)
        try:
            return asyncio.run(_explore(loaded, run_dir, report))
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None
        finally:
            close_warm_pools()


@dataclass(frozen=True)
class _ExploredStage:
    """A stage that rolls out and does not train."""

    config: StageConfig
    policy: PolicyModel
    tasks: StageTasks
    seed: int
    store: ExperienceStore
    pipeline: Pipeline
    trace: Trace
    first_version: int = 0


class _KeptBatches(RolloutBatches):
    """Batches that stay in the store. All are of the first version, whatever the step."""

    prefix = ""  #: of the names of groups, which must differ from those of the trainer's run
    _accepted = 0

    async def keep(self, step: int) -> int:
        """Roll out the groups of a step of the stage, from 0; returns how many went into the store."""
        self._accepted = 0
        await self._fill(self._first_version + step)
        self._scheduler.end_step()
        return self._accepted

    def _waiting(self, version: int) -> int:
        return self._accepted

    def _is_late(self, experiences: Sequence[Experience], version: int) -> bool:
        return False

    async def _process_group(self, experiences: Sequence[Experience], version: int) -> bool:
        return await super()._process_group(experiences, self._first_version)

    def _put(self, groups: list[Group]) -> None:
        self._accepted += any(group.kind is ExperienceKind.ROLLOUT for group in groups)
        super()._put([imported_group(group, self.prefix) for group in groups])


async def _explore(loaded: LoadedRun, run_dir: Path, report: Callable[[str], None]) -> dict[str, Any]:
    made = 0
    with keep_heartbeat(run_dir, _PROCESS) as heartbeat:
        setup = set_up_run(loaded, run_dir, None, trains=False)
        [config] = setup.loaded.stages
        for message in (setup.describe(run_dir), *setup.messages):
            report(message)
        buffers = Buffers(run_dir, setup.run_id, shared=True)
        rewards = build_stage_rewards(config, setup.policy)
        seed, tasks = derive_seed(loaded.config.seed, 0), setup.tasks[0]
        pipeline = build_stage_pipeline(config, setup.policy, seed)
        explorers = LocalRollouts(config, setup.policy, rewards, precision=setup.precision, tasks=tasks.training.tasks)
        stage = _ExploredStage(config, setup.policy, tasks, seed, buffers.of_stage(config), pipeline, Trace())
        parts = build_rollout_components(stage, explorers.explorer(trace=stage.trace), explorers.generating)
        batches = _KeptBatches(config, parts, RatingOverrides([]), first_version=0, seed=seed)
        batches.prefix = f"{setup.run_id[:8]}-"
        try:
            explorers.publish(0)
            stage.store.put_tasks(tasks.training.tasks)
            report(
                f"no trainer takes part (await_trainer: false): groups of {config.steps} steps go into the buffer, "
                f"at the weights of model.path: {loaded.config.model.path}"
            )
            for step in range(config.steps):
                heartbeat.set_activity(f"roll out, step {step + 1} of {config.steps}, without a trainer", "")
                made += await batches.keep(step)
                atomic_write(run_dir / EXPLORED, (json.dumps({"groups": made}) + "\n").encode(), durable=True)
        finally:
            await batches.close()
            pipeline.close()
            await explorers.close()
            rewards.close()
            buffers.close()
    report(f"{made} groups are in the buffer; a trainer learns from them by: {_next_command(run_dir, config)}")
    return {"groups": made}


def _next_command(run_dir: Path, config: StageConfig) -> str:
    """The trainer's weights go on while it learns from the groups, which are all of the first version."""
    stale = max(config.max_staleness, config.steps)
    return f"rollmill run {run_dir}/config.yaml --set mode=train --set max_staleness={stale} --out {run_dir}"
