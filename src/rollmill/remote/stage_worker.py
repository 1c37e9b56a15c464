"""One stage in an explorer's process: rolls out and computes rewards with the newest weights it has received."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rollmill.config.checks.engine import uses_engine
from rollmill.config.engines import VLLMEngineConfig
from rollmill.config.placement import ExplorerSpec
from rollmill.config.rollout import SamplingConfig
from rollmill.config.run import StageConfig
from rollmill.errors import DeadlineError
from rollmill.models.load import PolicyModel
from rollmill.models.lora import has_lora
from rollmill.orchestrator.components import build_stage_rewards
from rollmill.orchestrator.engine import build_engine, build_publisher
from rollmill.orchestrator.explorer_factory import ExplorerFactory
from rollmill.orchestrator.metrics import sum_metrics
from rollmill.registry import import_file
from rollmill.rollout import Explorer
from rollmill.rollout.explorer import DomainExplorer
from rollmill.trackers.trace import Span, Trace
from rollmill.types import Experience, Task
from rollmill.weights import (
    BroadcastReceiver,
    FolderReceiver,
    InPlacePublisher,
    SharedMemoryReceiver,
    WeightPublisher,
    WeightReceiver,
)

_PUBLISHED_S, _POLL_S = 60.0, 0.05


@dataclass(frozen=True)
class WorkerSetup:
    """Everything that an explorer is built from. Configuration is JSON, as plugin classes are known only later."""

    stage_json: str  #: the StageConfig
    policy: PolicyModel | None  #: a copy; its trained weights come by the transport. None: the process has one
    precision: str
    threads: int  #: default of explorers whose kind sets none
    plugins: list[Path]
    tasks: list[Task]  #: candidates for worked examples
    transport: str  #: of the weights: memory, folder or broadcast
    weights_address: str  #: path of the weights, or the address of the sender


@dataclass(frozen=True)
class RolloutRequest:
    """A request to roll out a group.

    `version` is the lowest version of weights it may use. `stage` is a StageConfig as JSON for held-out tasks with
    their own sections; "" is the training stage's.
    """

    task: Task
    sampling: SamplingConfig
    n: int
    seed: int
    group: str
    version: int
    with_greedy: bool = False
    stage: str = ""


@dataclass(frozen=True)
class RolloutReply:
    """A group, and the process's metrics since its last reply."""

    experiences: list[Experience]
    spans: list[Span]  #: in seconds since the epoch
    tokens: int
    metrics: list[dict[str, float]] = field(default_factory=list)
    counters: dict[str, float] = field(default_factory=dict)  #: counts of rewards since the start of the process
    counts: dict[str, float] = field(default_factory=dict)  #: counts of rollouts by a workflow


class StageWorker:
    """One explorer, with the engine and the threads of its kind. Any number of groups call it from one event loop."""

    def __init__(self, setup: WorkerSetup, kind: ExplorerSpec) -> None:
        self._kind = kind
        torch.set_num_threads(kind.threads or setup.threads)
        for plugin in setup.plugins:
            import_file(plugin)
        assert setup.policy is not None
        self._setup, self._policy = setup, setup.policy
        stage = self._stage_of(setup.stage_json)
        self._reads_itself = engine_reads_weights(stage, setup.transport, self._policy)
        place = Path(setup.weights_address) if self._reads_itself else None
        self._engine = build_engine(self._policy, stage, setup.precision, place)
        self._version = -1  # of the weights received; -1: none yet
        self._publisher: WeightPublisher
        if self._reads_itself:
            self._publisher = InPlacePublisher(self._engine)
            self._policy.model.to("meta")  # unused in this process
        else:
            self._publisher = build_publisher(self._policy, self._engine, setup.precision)
        self._trace = Trace()
        self._receiver = _receiver(setup, self._policy)
        self._updating: asyncio.Task[None] | None = None
        self._explorers: list[ExplorerFactory] = []
        self._made: dict[str, Explorer | DomainExplorer] = {}
        self._rewards: list[Any] = []
        self._tokens = 0
        self._made[""] = self._make(setup.stage_json)

    async def update(self, version: int) -> None:
        """Update to weights of at least this version; running rollouts continue with them."""
        while self._version < version:
            if self._updating is None or self._updating.done():
                self._updating = asyncio.ensure_future(self._update(version))
            await asyncio.shield(self._updating)  # other calls wait for it, too

    async def rollout(self, request: RolloutRequest) -> RolloutReply:
        """Roll out a group and compute its rewards. Raises like Explorer.rollout, WeightSyncError and DeadlineError."""
        await self.update(request.version)
        if request.stage not in self._made:
            self._made[request.stage] = self._make(request.stage)
        explorer = self._made[request.stage]
        experiences = await explorer.rollout(
            request.task,
            request.sampling,
            n=request.n,
            seed=request.seed,
            group=request.group,
            with_greedy=request.with_greedy,
        )
        before, self._tokens = self._tokens, self._engine.tokens_generated
        offset = time.time() - time.perf_counter()
        return RolloutReply(
            experiences,
            shift_spans(self._trace.take(), offset),
            self._tokens - before,
            [each.metrics() for each in self._explorers],
            sum_metrics([each.counters() for each in self._rewards]),
            explorer.take_counts(),
        )

    async def close(self) -> None:
        """Close environments, tools, engine and rewards."""
        if self._updating is not None:
            self._updating.cancel()
        for explorers in self._explorers:
            await explorers.close()
        await self._engine.close()
        self._publisher.close()
        for rewards in self._rewards:
            rewards.close()
        self._receiver.close()

    async def _update(self, version: int) -> None:
        if isinstance(self._receiver, FolderReceiver):
            await self._until_published(version)
        if not self._reads_itself:
            await asyncio.to_thread(self._receiver.fetch)  # rollouts continue, and the trainer's questions are answered
        here = version if self._reads_itself else self._receiver.receive(trainable_parameters(self._policy))
        self._publisher.publish(here)
        self._version = here

    async def _until_published(self, version: int) -> None:
        """Wait for a version that other hosts may see later than its announcement. Raises DeadlineError."""
        ends = time.monotonic() + _PUBLISHED_S
        while (newest := self._receiver.newest()) is None or newest < version:
            if time.monotonic() > ends:
                advice = f"Does this host see {self._setup.weights_address}, to which the trainer writes?"
                raise DeadlineError("an explorer", f"weights of version {version}", _PUBLISHED_S, advice)
            await asyncio.sleep(_POLL_S)

    def _make(self, text: str) -> Explorer | DomainExplorer:
        stage = self._stage_of(text)
        rewards = build_stage_rewards(stage, self._policy)
        self._rewards.append(rewards)
        if self._explorers:
            explorers = self._explorers[0].variant(stage, rewards)
        else:
            precision, tasks = self._setup.precision, self._setup.tasks
            explorers = ExplorerFactory(stage, self._policy, self._engine, rewards, precision=precision, tasks=tasks)
        self._explorers.append(explorers)
        return explorers.explorer(self._trace)

    def _stage_of(self, text: str) -> StageConfig:
        return StageConfig.model_validate_json(text).with_engine(self._kind.engine)


def _receiver(setup: WorkerSetup, policy: PolicyModel) -> WeightReceiver:
    """Build the receiver of the transport's weights."""
    match setup.transport:
        case "memory":
            return SharedMemoryReceiver(Path(setup.weights_address))
        case "broadcast":
            return BroadcastReceiver(setup.weights_address, device=policy.device)
    return FolderReceiver(Path(setup.weights_address))


def shift_spans(spans: list[Span], by: float) -> list[Span]:
    """Convert spans to another clock."""
    return [Span(each.kind, each.requested + by, each.started + by, each.ended + by) for each in spans]


def engine_reads_weights(stage: StageConfig, weights: str, policy: PolicyModel) -> bool:
    """True if the engine reads the trainer's weights itself: vLLM's process, from shared memory, without adapters."""
    shared = weights == "memory" and not has_lora(policy.model)
    return shared and isinstance(stage.engine, VLLMEngineConfig) and uses_engine(stage)


def trainable_parameters(policy: PolicyModel) -> dict[str, Tensor]:
    """The parameters that an update changes, by name: all of them, or only adapters."""
    return {name: each.data for name, each in policy.model.named_parameters() if each.requires_grad}
