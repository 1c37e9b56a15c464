"""Explorers in other processes, with the interface of those in this one."""

from __future__ import annotations

import asyncio
import shutil
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rollmill.config.placement import RayPlacement
from rollmill.config.rollout import SamplingConfig
from rollmill.config.run import StageConfig
from rollmill.engines.base import RolloutEngine
from rollmill.models.load import PolicyModel
from rollmill.orchestrator.components import build_rollouts
from rollmill.orchestrator.context import RunContext
from rollmill.orchestrator.engine import build_native_engine, shared_checksum
from rollmill.orchestrator.metrics import sum_metrics
from rollmill.remote.actor_pool import ActorPool
from rollmill.remote.explorer_actor import start_explorer
from rollmill.remote.explorer_worker import RolloutReply, RolloutRequest, WorkerSetup, shift_spans, trainable_parameters
from rollmill.remote.placement_group import PlacementGroup, ResourceRequest
from rollmill.remote.ray_session import host_address, join, ray_module
from rollmill.rewards import RewardManager
from rollmill.rollout.base import OnGenerated
from rollmill.rollout.draft_cache import DraftCache
from rollmill.trackers.trace import Trace
from rollmill.types import Experience, Task
from rollmill.weights import BroadcastSender, FolderSender, SharedMemorySender, WeightSender, shared_memory_folder

if TYPE_CHECKING:
    from rollmill.orchestrator.batches import BatchSource
    from rollmill.orchestrator.evaluation import Evaluator
    from rollmill.orchestrator.stages import Stage

START_S = 300.0
"""How long explorers may take to start, models and all."""


class RemoteExplorers:
    """The run's explorers, Ray actors, at work on one stage; they get the trainer's weights with every `publish`.

    Args:
        policy: what is trained; explorers begin with a copy.
        tasks: what worked examples are chosen from.
    """

    trains_beside = True

    def __init__(self, config: StageConfig, policy: PolicyModel, context: RunContext, tasks: Sequence[Task]) -> None:
        assert isinstance(context.placement, RayPlacement)
        self.engine: RolloutEngine = build_native_engine(policy, config.rollout, context.precision)  # generates nothing
        self._policy, placement = policy, context.placement
        self.version, self.tokens_generated = -1, 0
        self._metrics: list[dict[str, float]] = []
        self._counters: dict[tuple[str, int], dict[str, float]] = {}  # by explorer and life, also those that have died
        address = join(placement.address)
        self._room: PlacementGroup | None = None  # where the explorers are this stage's own
        self._pool = context.explorers or self._own(placement, context)
        count = len(self._pool.workers)
        self.location = self.waits_for = f"{count} explorer{'s' * (count > 1)} on Ray at {address}"
        self._name = uuid.uuid4().hex  # of this use of the explorers: what others have asked them for is dropped
        place, self._sender = _transport(config, context, policy, self._name)
        self._setup = ray_module().put(
            WorkerSetup(
                config.model_dump_json(),
                policy,
                context.precision,
                context.threads,
                list(context.plugins),
                [task for task in tasks if task.response is not None],
                placement.weights,
                place,
            )
        )
        self._started: asyncio.Task[None] | None = None

    def _own(self, placement: RayPlacement, context: RunContext) -> ActorPool:
        """Explorers that end with the stage."""
        self._room = PlacementGroup(explorer_needs(placement), one_host=False)
        return explorer_pool(placement, start_explorers(placement, self._room, context.run_dir))

    def publish(self, version: int) -> None:
        """See InPlacePublisher: the trainer's parameters are now those of `version`."""
        self._sender.send(version, trainable_parameters(self._policy))
        self.version = version
        self._pool.forgive()
        if self._started is not None:
            self._pool.tell("update", self._name, version)

    def start(self, stage: Stage) -> tuple[BatchSource | None, Evaluator | None]:
        """See RolloutBackend."""
        return build_rollouts(stage, self, self)

    def opened(self, stage: Stage) -> None:
        """Explorers are told with the first group that they roll out."""

    def explorer(self, trace: Trace | None = None, drafts: DraftCache | None = None) -> RemoteExplorer:
        """One that rolls out as the stage's `workflow` says."""
        return RemoteExplorer(self, "", trace)

    def variant(self, config: StageConfig, judge: RewardManager) -> RemoteExplorersVariant:
        """For tasks that are rolled out or judged otherwise; explorers have judges of their own."""
        return RemoteExplorersVariant(self, config.model_dump_json())

    async def ask(self, asked: RolloutRequest) -> RolloutReply:
        """Have a group rolled out. Raises like Explorer.rollout; EngineError where explorers die again and again."""
        if self._started is None:
            self._started = asyncio.ensure_future(self._pool.begin(self._name, self._setup))
        await asyncio.shield(self._started)
        name, reply = await self._pool.ask("rollout", self._name, asked)
        assert isinstance(reply, RolloutReply)
        self.tokens_generated += reply.tokens
        self._metrics += reply.metrics
        self._counters[name] = reply.counters
        return reply

    def metrics(self) -> dict[str, float]:
        """What has happened in environments and tools since the last call, and how many explorers were replaced."""
        happened, self._metrics = self._metrics, []
        replaced, self._pool.replaced = self._pool.replaced, 0
        return sum_metrics(happened) | ({"explorer/replaced": float(replaced)} if replaced else {})

    def reward_counters(self) -> dict[str, float]:
        """See RolloutBackend."""
        return sum_metrics(list(self._counters.values()))

    def state_dict(self) -> None:
        """Explorers keep nothing that a checkpoint needs."""

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Continue where `state_dict` was taken."""

    async def close(self) -> None:
        """The stage has ended; may be called twice."""
        if self._started is not None:
            self._started.cancel()
        await self._pool.end(self._name)
        if self._room is not None:
            self._pool.kill()
            self._room.close()
        await self.engine.close()
        self._sender.close()


class RemoteExplorersVariant:
    """As RemoteExplorers, for other sections of the same stage."""

    def __init__(self, explorers: RemoteExplorers, stage: str) -> None:
        self._explorers, self._stage = explorers, stage

    def explorer(self, trace: Trace | None = None, drafts: DraftCache | None = None) -> RemoteExplorer:
        """One that rolls out as these sections say."""
        return RemoteExplorer(self._explorers, self._stage, trace)

    def variant(self, config: StageConfig, judge: RewardManager) -> RemoteExplorersVariant:
        """See ExplorerSource."""
        return RemoteExplorersVariant(self._explorers, config.model_dump_json())

    def metrics(self) -> dict[str, float]:
        """Those of the stage tell it all."""
        return {}

    async def close(self) -> None:
        """Those of the stage are closed."""


class RemoteExplorer:
    """Has groups rolled out; see Explorer. Their rewards come with their tokens."""

    elsewhere = True

    def __init__(self, explorers: RemoteExplorers, stage: str, trace: Trace | None) -> None:
        self._explorers, self._stage, self._trace = explorers, stage, trace
        self._counts: Counter[str] = Counter()

    async def rollout(
        self,
        task: Task,
        sampling: SamplingConfig,
        *,
        n: int,
        seed: int,
        group: str,
        generated: OnGenerated | None = None,
        with_greedy: bool = False,
    ) -> list[Experience]:
        """See Explorer."""
        version = self._explorers.version
        asked = RolloutRequest(task, sampling, n, seed, group, version, with_greedy, self._stage)
        reply = await self._explorers.ask(asked)
        if self._trace is not None:
            for span in shift_spans(reply.spans, time.perf_counter() - time.time()):
                self._trace.add(span.kind, span.asked, span.started, span.ended)
        self._counts.update(reply.counts)
        if generated is not None:
            generated(reply.experiences)
        return reply.experiences

    def take_counts(self) -> dict[str, float]:
        """See Explorer."""
        counts, self._counts = self._counts, Counter()
        return dict(counts)


def explorer_needs(placement: RayPlacement) -> list[ResourceRequest]:
    """What each explorer reserves, by number."""
    return [
        ResourceRequest(
            placement.cpus if kind.cpus is None else kind.cpus,
            placement.gpus if kind.gpus is None else kind.gpus,
        )
        for kind in placement.every_explorer
    ]


def start_explorers(placement: RayPlacement, room: PlacementGroup, run_dir: Path) -> dict[str, Any]:
    """The actors, by name; they have the first places of the room."""
    return {
        (name := f"explorer {number}"): start_explorer(run_dir, name, kind, room.options(number))
        for number, kind in enumerate(placement.every_explorer)
    }


def explorer_pool(placement: RayPlacement, actors: dict[str, Any]) -> ActorPool:
    """What shares work among them."""
    health, replacements = placement.health_s, placement.replacements
    return ActorPool("explorer", actors, health_s=health, start_s=START_S, replacements=replacements)


def _transport(config: StageConfig, context: RunContext, policy: PolicyModel, name: str) -> tuple[str, WeightSender]:
    """A fresh place for weights, and what sends them there; what a trainer that died has left is removed."""
    placement, dtype = context.placement, torch.bfloat16 if context.precision == "bf16" else None
    assert isinstance(placement, RayPlacement)
    if placement.weights == "memory":
        remove_stale_weights(context.run_id)
        place = shared_memory_folder() / f"rollmill-{context.run_id}-{name}"
        checksum = shared_checksum(config.with_engine(kind.engine) for kind in placement.explorers)
        return str(place), SharedMemorySender(place, trainable_parameters(policy), dtype=dtype, checksum=checksum)
    if placement.weights == "broadcast":
        device = policy.device if placement.nccl else None
        sender = BroadcastSender(host_address(), name, trainable_parameters(policy), dtype=dtype, device=device)
        return sender.address, sender
    folder = Path(placement.weights_folder or context.run_dir / "weights").absolute() / context.run_id
    shutil.rmtree(folder, ignore_errors=True)
    return str(folder / name), FolderSender(folder / name, trainable_parameters(policy), dtype=dtype)


def remove_stale_weights(run_id: str) -> None:
    """Remove what a trainer that died has left in this host's shared memory."""
    for left in shared_memory_folder().glob(f"rollmill-{run_id}-*"):
        left.unlink(missing_ok=True)
