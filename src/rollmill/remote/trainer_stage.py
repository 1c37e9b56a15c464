"""The trainer's side of a run whose rollouts and evaluations are made by explorer processes that join it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from rollmill.buffer.base import REMOTE_EXPLORER
from rollmill.buffer.experts import RatingOverrides
from rollmill.buffer.sql import SqlStore
from rollmill.config.run import RunConfig, StageConfig
from rollmill.engines.base import RolloutEngine
from rollmill.errors import DeadlineError
from rollmill.models.load import PolicyModel
from rollmill.orchestrator.batch_reader import BatchReader, oldest_allowed
from rollmill.orchestrator.batches import BatchSource
from rollmill.orchestrator.engine import build_native_engine
from rollmill.orchestrator.stages import RolloutBackend, Stage
from rollmill.orchestrator.state import StageState
from rollmill.remote.evaluation import POLL_S, RemoteEvaluator
from rollmill.remote.explorer_worker import trainable_parameters
from rollmill.remote.run_state import (
    TrainerStatus,
    describe_explorers,
    read_trainer_status,
    remove_finished_stages,
    remove_run_state,
    weights_folder,
)
from rollmill.trackers.heartbeat import HeartbeatWriter
from rollmill.trackers.trace import Trace
from rollmill.types import Experience
from rollmill.weights import FolderSender


class RemoteBatches:
    """Groups that explorer processes have put into the store; a BatchSource. Groups that are too stale are skipped."""

    def __init__(
        self,
        config: StageConfig,
        store: SqlStore,
        reader: BatchReader,
        trace: Trace,
        run_dir: Path,
        heartbeat: HeartbeatWriter,
    ) -> None:
        self._config, self._store, self._reader = config, store, reader
        self._trace, self._run_dir, self._heartbeat = trace, run_dir, heartbeat
        self._expired: int | None = None  # count of expired groups before the last step

    async def roll_out(self, version: int, deadlines: int = 1) -> None:
        """Nothing to do: explorers roll out by themselves."""

    def replay(self, version: int) -> list[Experience]:
        """See BatchReader."""
        return self._reader.replay(version)

    def known(self) -> list[Experience] | None:
        """None: groups without rewards are not visible here."""
        return None

    async def collect(self, version: int) -> list[Experience]:
        """See BatchSource. Raises DeadlineError if too few groups arrive; names the explorers."""
        with self._trace.record_span("rollout"):
            await self._wait(version)
        return self._reader.take(version, oldest_allowed(self._config, version))

    def upcoming(self) -> list[list[Experience]]:
        """Empty: groups of later steps are compared when they are trained on."""
        return []

    async def _wait(self, version: int) -> None:
        batch, deadline_s, began = self._config.rollout.batch, self._config.rollout.deadline_s, time.monotonic()
        shown = 0
        self._expired = self._store.expired() if self._expired is None else self._expired
        while (missing := batch - self._store.waiting(min_version=oldest_allowed(self._config, version))) > 0:
            if missing != shown:
                self._heartbeat.set_activity(f"step {version + 1}", f"{missing} groups of explorers", version=version)
                shown = missing
            if time.monotonic() - began > deadline_s:
                what = f"{missing} of the {batch} groups of step {version + 1}"
                raise DeadlineError("the trainer", what, deadline_s, describe_explorers(self._run_dir))
            await asyncio.sleep(POLL_S)
        self._heartbeat.set_activity(f"step {version + 1}", version=version)

    def learned(self, version: int) -> None:
        """See BatchReader."""
        self._reader.learned(version)

    def metrics(self) -> dict[str, float]:
        """Metrics of replay, and the number of groups that became too stale."""
        before, self._expired = self._expired or 0, self._store.expired()
        late = {"raw/late": float(self._expired - before)} if self._expired > before else {}
        return self._reader.metrics() | late

    def mark(self, state: StageState) -> None:
        """Nothing to record: explorers store their own state."""

    async def snapshot(self, state: StageState) -> None:
        """Nothing to store: explorers' running groups are not part of a checkpoint."""

    def restore(self, state: StageState) -> None:
        """Nothing to restore: the store keeps its groups."""

    async def close(self) -> None:
        """Nothing to stop."""


class FolderPublisher:
    """A WeightPublisher that writes versions to a folder, starting with `open`, at the first step boundary."""

    def __init__(self, folder: Path, policy: PolicyModel, precision: str) -> None:
        dtype = torch.bfloat16 if precision == "bf16" else None
        self._policy, self._open = policy, False
        self._sender = FolderSender(folder, trainable_parameters(policy), dtype=dtype)

    def open(self, version: int) -> None:
        """Publish the trainer's parameters as `version`, and all later versions."""
        self._open = True
        self.publish(version)

    def publish(self, version: int) -> None:
        """See WeightPublisher."""
        if self._open:
            self._sender.send(version, trainable_parameters(self._policy))

    def close(self) -> None:
        """See FolderSender."""
        self._sender.close()


class JoinedRollouts:
    """The rollout backend of a trainer whose explorers are processes that join the run; see RolloutBackend."""

    waits_for, trains_beside, tokens_generated = "explorers", False, 0

    def __init__(self, stage: Stage) -> None:
        context = stage.context
        assert context.heartbeat is not None
        self._heartbeat, self._rewards = context.heartbeat, stage.rewards
        self.engine: RolloutEngine = build_native_engine(
            stage.policy, stage.config.rollout, context.precision
        )  # generates nothing
        folder = weights_folder(context.run_dir, stage.index)
        self._publisher = FolderPublisher(folder, stage.policy, context.precision)
        join = f"rollmill run {context.run_dir}/config.yaml --set mode=explore --out {context.run_dir}"
        self.location = f"explorers join by: {join}"

    def publish(self, version: int) -> None:
        """See RolloutBackend."""
        self._publisher.publish(version)

    def start(self, stage: Stage) -> tuple[BatchSource | None, RemoteEvaluator | None]:
        """See RolloutBackend."""
        config, context, store, batches, evaluator = stage.config, stage.context, stage.store, None, None
        if stage.rewards is None:
            return None, None
        if config.algorithm.uses_rollouts:
            assert isinstance(store, SqlStore)
            ratings, first = RatingOverrides(context.buffers.of_run(store)), stage.first_version
            reader = BatchReader(config, store, ratings, first_version=first, seed=stage.seed)
            batches = RemoteBatches(config, store, reader, stage.trace, context.run_dir, self._heartbeat)
        if config.evaluation is not None:
            run_dir, heartbeat = context.run_dir, self._heartbeat
            evaluator = RemoteEvaluator(config, run_dir, stage.index, lambda: stage.version, heartbeat)
        return batches, evaluator

    def opened(self, stage: Stage) -> None:
        """Let explorers in; groups they stored for an earlier stage expire."""
        context = stage.context
        self._heartbeat.set_activity(f"stage {stage.config.name}", version=stage.version)
        remove_finished_stages(context.run_dir, stage.index)
        TrainerStatus(context.run_id, stage.index, stage.first_version).write(context.run_dir)
        assert isinstance(stage.store, SqlStore)
        stage.store.expire_remote(REMOTE_EXPLORER + stage.config.name, step=stage.first_version)
        if stage.batches is not None or stage.evaluator is not None:
            self._publisher.open(stage.version)

    def metrics(self) -> dict[str, float]:
        """Empty: explorers record their environments' metrics."""
        return {}

    def reward_counters(self) -> dict[str, float]:
        """See RolloutBackend."""
        return {} if self._rewards is None else self._rewards.counters()

    def state_dict(self) -> None:
        """Explorers have no state that a checkpoint needs."""

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Nothing to restore."""

    async def close(self) -> None:
        """See RolloutBackend."""
        await self.engine.close()
        self._publisher.close()


@contextmanager
def run_mode(config: RunConfig, run_dir: Path, *, resumed: bool) -> Iterator[Callable[[Stage], RolloutBackend] | None]:
    """Yield the rollout backend of the run's mode (None: by `placement`); afterwards tell explorers that the run is
    done."""
    if config.mode != "train":
        yield None
        return
    if not resumed:
        remove_run_state(run_dir)
    yield JoinedRollouts
    status = read_trainer_status(run_dir)
    assert status is not None
    replace(status, done=True).write(run_dir)
