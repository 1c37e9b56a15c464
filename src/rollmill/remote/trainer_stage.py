"""The trainer's half of a run: stages whose groups, and evaluations, are made by explorers in other processes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from rollmill.buffer.base import REMOTE_EXPLORER
from rollmill.buffer.ratings import RatingOverrides
from rollmill.buffer.sql import SqlStore
from rollmill.config.run import RunConfig, StageConfig
from rollmill.engines.base import RolloutEngine
from rollmill.errors import DeadlineError
from rollmill.models.load import PolicyModel
from rollmill.orchestrator.batch_reader import BatchReader, oldest_allowed
from rollmill.orchestrator.engine import build_native_engine
from rollmill.orchestrator.loop import MakeLoop, TrainingLoop
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
from rollmill.rewards import RewardManager
from rollmill.trackers.heartbeat import HeartbeatWriter
from rollmill.trackers.trace import Trace
from rollmill.types import Experience
from rollmill.weights import FolderSender, WeightPublisher


class RemoteBatches:
    """What explorers in other processes have put into the store; see Supplies. No group that is too stale is taken."""

    def __init__(
        self,
        config: StageConfig,
        store: SqlStore,
        consumption: BatchReader,
        trace: Trace,
        run_dir: Path,
        heart: HeartbeatWriter,
    ) -> None:
        self._config, self._store, self._consumption = config, store, consumption
        self._trace, self._run_dir, self._heart = trace, run_dir, heart
        self._expired: int | None = None  # groups that were too stale, before the last step

    async def roll_out(self, version: int, deadlines: int = 1) -> None:
        """Explorers do, whatever happens here."""

    def again(self, version: int) -> list[Experience]:
        """See BatchReader."""
        return self._consumption.again(version)

    def known(self) -> list[Experience] | None:
        """Nothing is known of groups before they are judged."""
        return None

    async def collect(self, version: int) -> list[Experience]:
        """See Supplies. Raises DeadlineError where too few come; names the explorers."""
        with self._trace.record_span("rollout"):
            await self._wait(version)
        return self._consumption.take(version, oldest_allowed(self._config, version))

    def upcoming(self) -> list[list[Experience]]:
        """None: what has been put for later steps is compared when it is learned from."""
        return []

    async def _wait(self, version: int) -> None:
        batch, deadline_s, began = self._config.rollout.batch, self._config.rollout.deadline_s, time.monotonic()
        said = 0
        self._expired = self._store.expired() if self._expired is None else self._expired
        while (missing := batch - self._store.waiting(min_version=oldest_allowed(self._config, version))) > 0:
            if missing != said:
                self._heart.set_activity(f"step {version + 1}", f"{missing} groups of explorers", version=version)
                said = missing
            if time.monotonic() - began > deadline_s:
                what = f"{missing} of the {batch} groups of step {version + 1}"
                raise DeadlineError("the trainer", what, deadline_s, describe_explorers(self._run_dir))
            await asyncio.sleep(POLL_S)
        self._heart.set_activity(f"step {version + 1}", version=version)

    def learned(self, version: int) -> None:
        """See BatchReader."""
        self._consumption.learned(version)

    def metrics(self) -> dict[str, float]:
        """What joined again, and how many groups had become too stale."""
        before, self._expired = self._expired or 0, self._store.expired()
        late = {"raw/late": float(self._expired - before)} if self._expired > before else {}
        return self._consumption.metrics() | late

    def mark(self, state: StageState) -> None:
        """Explorers remember where they are."""

    async def snapshot(self, state: StageState) -> None:
        """What explorers have under way is no part of a checkpoint."""

    def restore(self, state: StageState) -> None:
        """The store is what it was."""

    async def close(self) -> None:
        """Nothing is under way here."""


class FolderPublisher:
    """A WeightPublisher that writes versions to a folder, from `open` on: before, they are not those of a boundary."""

    def __init__(self, folder: Path, policy: PolicyModel, precision: str) -> None:
        dtype = torch.bfloat16 if precision == "bf16" else None
        self._policy, self._open = policy, False
        self._sender = FolderSender(folder, trainable_parameters(policy), dtype=dtype)

    def open(self, version: int) -> None:
        """The trainer's parameters are those of `version`, and are published from now on."""
        self._open = True
        self.publish(version)

    def publish(self, version: int) -> None:
        """See WeightPublisher."""
        if self._open:
            self._sender.send(version, trainable_parameters(self._policy))

    def close(self) -> None:
        """See FolderSender."""
        self._sender.close()


class TrainerProcessLoop(TrainingLoop):
    """A TrainingLoop that rolls nothing out."""

    @property
    def _heart(self) -> HeartbeatWriter:
        assert self._context.heartbeat is not None
        return self._context.heartbeat

    @property
    def _kept_versions(self) -> int:
        """See TrainingLoop: explorers put groups into the store at any time."""
        return self.config.max_staleness

    def _connect(self) -> tuple[RolloutEngine, WeightPublisher]:
        """An engine that never generates, and a way for the weights."""
        folder = weights_folder(self._context.run_dir, self._index)
        self._posted = FolderPublisher(folder, self._policy, self._context.precision)
        return build_native_engine(self._policy, self.config.rollout, self._context.precision), self._posted

    def _explore(self, judge: RewardManager) -> None:
        """Wait for others to roll out."""
        config, context = self.config, self._context
        assert isinstance(self._store, SqlStore)
        if config.algorithm.uses_rollouts:
            ratings = RatingOverrides(context.buffers.of_run(self._store))
            version, seed = self._first_version, self._seed
            consumption = BatchReader(config, self._store, ratings, first_version=version, seed=seed)
            self._supply = RemoteBatches(config, self._store, consumption, self._trace, context.run_dir, self._heart)
        if config.evaluation is not None:
            self.evaluator = RemoteEvaluator(config, context.run_dir, self._index, lambda: self.version, self._heart)

    @property
    def elsewhere(self) -> str:
        """How explorers join."""
        return f"explorers join by: rollmill run {self._context.run_dir}/config.yaml --set mode=explore --out " + str(
            self._context.run_dir
        )

    def begin(self, stores: dict[str, dict[str, Any]]) -> None:
        """See TrainingLoop; explorers are told afterwards."""
        super().begin(stores)
        self._open()

    def restore(self, state: StageState, trainer: dict[str, Any]) -> None:
        """See TrainingLoop; explorers are told afterwards."""
        super().restore(state, trainer)
        self._open()

    def _open(self) -> None:
        """Let explorers in; what they have put for an earlier stage is not learned from any more."""
        self._heart.set_activity(f"stage {self.config.name}", version=self.version)
        remove_finished_stages(self._context.run_dir, self._index)
        TrainerStatus(self._context.run_id, self._index, self._first_version).write(self._context.run_dir)
        assert isinstance(self._store, SqlStore)
        self._store.expire_remote(REMOTE_EXPLORER + self.config.name, step=self._first_version)
        if self._supply is not None or self.evaluator is not None:
            self._posted.open(self.version)


@contextmanager
def choose_loop(config: RunConfig, run_dir: Path, *, resumed: bool) -> Iterator[MakeLoop]:
    """What makes the stages of a run in its mode; what others have to know of its end is told when the block ends."""
    if config.mode != "train":
        yield TrainingLoop
        return
    if not resumed:
        remove_run_state(run_dir)
    yield TrainerProcessLoop
    notice = read_trainer_status(run_dir)
    assert notice is not None
    replace(notice, done=True).write(run_dir)
