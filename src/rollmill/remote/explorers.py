"""Remote explorers on Ray, with the interface of local ones."""

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
"""Timeout for starting explorers, including their models."""


class RemoteExplorers:
    """The run's explorers, Ray actors, during one stage; they get the trainer's weights with every `publish`.

    Args:
        policy: the trained model; explorers start with a copy.
        tasks: candidates for worked examples.
    """

    trains_beside = True

    def __init__(self, config: StageConfig, policy: PolicyModel, context: RunContext, tasks: Sequence[Task]) -> None:
        assert isinstance(context.placement, RayPlacement)
        self.engine: RolloutEngine = build_native_engine(policy, config.rollout, context.precision)  # generates nothing
        self._policy, placement = policy, context.placement
        self.version, self.tokens_generated = -1, 0
        self._metrics: list[dict[str, float]] = []
        self._counters: dict[tuple[str, int], dict[str, float]] = {}  # by explorer and restart, dead ones included
        address = join(placement.address)
        self._group: PlacementGroup | None = None  # set if the explorers belong to this stage
        self._pool = context.explorers or self._own(placement, context)
        count = len(self._pool.workers)
        self.location = self.waits_for = f"{count} explorer{'s' * (count > 1)} on Ray at {address}"
        self._name = uuid.uuid4().hex  # of this use of the explorers: earlier requests are dropped
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
        """Start explorers that end with the stage."""
        self._group = PlacementGroup(explorer_needs(placement), one_host=False)
        return explorer_pool(placement, start_explorers(placement, self._group, context.run_dir))

    def publish(self, version: int) -> None:
        """See InPlacePublisher: the trainer's parameters are now those of `version`."""
        self._sender.send(version, trainable_parameters(self._policy))
        self.version = version
        self._pool.reset_restart_budget()
        if self._started is not None:
            self._pool.tell("update", self._name, version)

    def start(self, stage: Stage) -> tuple[BatchSource | None, Evaluator | None]:
        """See RolloutBackend."""
        return build_rollouts(stage, self, self)

    def opened(self, stage: Stage) -> None:
        """Nothing to do: explorers begin with their first group."""

    def explorer(self, trace: Trace | None = None, drafts: DraftCache | None = None) -> RemoteExplorer:
        """Build an explorer with the stage's `workflow`."""
        return RemoteExplorer(self, "", trace)

    def variant(self, config: StageConfig, rewards: RewardManager) -> RemoteExplorersVariant:
        """Explorers for tasks with another workflow or other rewards; these have their own reward managers."""
        return RemoteExplorersVariant(self, config.model_dump_json())

    async def ask(self, request: RolloutRequest) -> RolloutReply:
        """Have a group rolled out. Raises like Explorer.rollout; EngineError if explorers keep dying."""
        if self._started is None:
            self._started = asyncio.ensure_future(self._pool.begin(self._name, self._setup))
        await asyncio.shield(self._started)
        name, reply = await self._pool.ask("rollout", self._name, request)
        assert isinstance(reply, RolloutReply)
        self.tokens_generated += reply.tokens
        self._metrics += reply.metrics
        self._counters[name] = reply.counters
        return reply

    def metrics(self) -> dict[str, float]:
        """Metrics of environments and tools since the last call, and the number of replaced explorers."""
        happened, self._metrics = self._metrics, []
        replaced, self._pool.replaced = self._pool.replaced, 0
        return sum_metrics(happened) | ({"explorer/replaced": float(replaced)} if replaced else {})

    def reward_counters(self) -> dict[str, float]:
        """See RolloutBackend."""
        return sum_metrics(list(self._counters.values()))

    def state_dict(self) -> None:
        """Explorers have no state that a checkpoint needs."""

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Nothing to restore."""

    async def close(self) -> None:
        """Stop work at the end of the stage; may be called twice."""
        if self._started is not None:
            self._started.cancel()
        await self._pool.end(self._name)
        if self._group is not None:
            self._pool.kill()
            self._group.close()
        await self.engine.close()
        self._sender.close()


class RemoteExplorersVariant:
    """RemoteExplorers for other configuration sections of the same stage."""

    def __init__(self, explorers: RemoteExplorers, stage: str) -> None:
        self._explorers, self._stage = explorers, stage

    def explorer(self, trace: Trace | None = None, drafts: DraftCache | None = None) -> RemoteExplorer:
        """Build an explorer with these sections."""
        return RemoteExplorer(self._explorers, self._stage, trace)

    def variant(self, config: StageConfig, rewards: RewardManager) -> RemoteExplorersVariant:
        """See ExplorerSource."""
        return RemoteExplorersVariant(self._explorers, config.model_dump_json())

    def metrics(self) -> dict[str, float]:
        """Empty: the stage's explorers report all metrics."""
        return {}

    async def close(self) -> None:
        """Nothing to close: the stage closes its explorers."""


class RemoteExplorer:
    """Has groups rolled out remotely; see Explorer. Their rewards arrive with their tokens."""

    is_remote = True

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
        request = RolloutRequest(task, sampling, n, seed, group, version, with_greedy, self._stage)
        reply = await self._explorers.ask(request)
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
    """Resources that each explorer reserves, by number."""
    return [
        ResourceRequest(
            placement.cpus if kind.cpus is None else kind.cpus,
            placement.gpus if kind.gpus is None else kind.gpus,
        )
        for kind in placement.every_explorer
    ]


def start_explorers(placement: RayPlacement, group: PlacementGroup, run_dir: Path) -> dict[str, Any]:
    """Start the actors, by name, in the first bundles of the placement group."""
    return {
        (name := f"explorer {number}"): start_explorer(run_dir, name, kind, group.options(number))
        for number, kind in enumerate(placement.every_explorer)
    }


def explorer_pool(placement: RayPlacement, actors: dict[str, Any]) -> ActorPool:
    """Build the pool of explorers."""
    health, replacements = placement.health_s, placement.replacements
    return ActorPool("explorer", actors, health_s=health, start_s=START_S, replacements=replacements)


def _transport(config: StageConfig, context: RunContext, policy: PolicyModel, name: str) -> tuple[str, WeightSender]:
    """Create a new location for weights and their sender; leftovers of a dead trainer are removed."""
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
    """Remove leftovers of a dead trainer in this host's shared memory."""
    for left in shared_memory_folder().glob(f"rollmill-{run_id}-*"):
        left.unlink(missing_ok=True)
