"""What an explorer's process does: roll out and judge with the newest weights it has been sent."""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rollmill.config.checks.engine import uses_engine
from rollmill.config.engine import VLLMEngineConfig
from rollmill.config.placement import ExplorerSpec
from rollmill.config.rollout import SamplingConfig
from rollmill.config.run import StageConfig
from rollmill.models.load import PolicyModel
from rollmill.models.lora import has_lora
from rollmill.orchestrator.components import build_stage_rewards
from rollmill.orchestrator.engine import build_engine, build_publisher
from rollmill.orchestrator.explorers import StageExplorers
from rollmill.orchestrator.metrics import sum_metrics
from rollmill.registry import import_file
from rollmill.rollout import Explorer
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


@dataclass(frozen=True)
class WorkerSetup:
    """All that an explorer is made of. Sections travel as JSON: users' parts are known only once plugins are loaded."""

    stage: str  #: the StageConfig
    policy: PolicyModel  #: a copy; its trained weights come by the transport
    precision: str
    threads: int  #: of explorers whose kind does not say
    plugins: list[Path]
    tasks: list[Task]  #: what worked examples are chosen from
    weights: str  #: the transport: memory, folder or broadcast
    place: str  #: where it writes, or the address of the sender


@dataclass(frozen=True)
class RolloutRequest:
    """A group that an explorer shall roll out.

    `version` is that of the weights it needs at least. `stage` is the StageConfig, as JSON, of held-out tasks that are
    rolled out otherwise; "" is the training's.
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
    """A group, and what has happened in the process since the reply before."""

    experiences: list[Experience]
    spans: list[Span]  #: in seconds since the epoch
    tokens: int
    metrics: list[dict[str, float]] = field(default_factory=list)
    counters: dict[str, float] = field(default_factory=dict)  #: of rewards, since the start of the process
    counts: dict[str, float] = field(default_factory=dict)  #: of rollouts by a workflow


class ExplorerWorker:
    """One explorer, with the engine and the threads of its kind. Its methods are called from one event loop, which any
    number of groups share."""

    def __init__(self, setup: WorkerSetup, kind: ExplorerSpec) -> None:
        self._kind = kind
        torch.set_num_threads(kind.threads or setup.threads)
        for plugin in setup.plugins:
            import_file(plugin)
        self._setup, self._policy = setup, setup.policy
        stage = self._stage_of(setup.stage)
        self._reads_itself = engine_reads_weights(stage, setup)
        place = Path(setup.place) if self._reads_itself else None
        self._engine = build_engine(setup.policy, stage, setup.precision, place)
        self._engine.version = -1  # no weights have come
        self._publisher: WeightPublisher
        if self._reads_itself:
            self._publisher = InPlacePublisher(self._engine)
            setup.policy.model.to("meta")  # nobody here computes with it
        else:
            self._publisher = build_publisher(setup.policy, self._engine, setup.precision)
        self._trace = Trace()
        self._receiver = _receiver(setup)
        self._updating: asyncio.Task[None] | None = None
        self._explorers: list[StageExplorers] = []
        self._made: dict[str, Explorer] = {}
        self._judges: list[Any] = []
        self._tokens = 0
        self._made[""] = self._make(setup.stage)

    async def ready(self) -> int:
        """The process id; answers while rollouts are under way."""
        return os.getpid()

    async def update(self, version: int) -> None:
        """Go on with weights of at least this version; those under way go on with them, too."""
        while self._engine.version < version:
            if self._updating is None or self._updating.done():
                self._updating = asyncio.ensure_future(self._update(version))
            await asyncio.shield(self._updating)  # others wait for it, too

    async def rollout(self, asked: RolloutRequest) -> RolloutReply:
        """Roll out a group and judge it. Raises like Explorer.rollout, WeightSyncError and DeadlineError."""
        await self.update(asked.version)
        if asked.stage not in self._made:
            self._made[asked.stage] = self._make(asked.stage)
        explorer = self._made[asked.stage]
        experiences = await explorer.rollout(
            asked.task,
            asked.sampling,
            n=asked.n,
            seed=asked.seed,
            group=asked.group,
            with_greedy=asked.with_greedy,
        )
        before, self._tokens = self._tokens, self._engine.tokens_generated
        offset = time.time() - time.perf_counter()
        return RolloutReply(
            experiences,
            shift_spans(self._trace.take(), offset),
            self._tokens - before,
            [each.metrics() for each in self._explorers],
            sum_metrics([judge.counters() for judge in self._judges]),
            explorer.take_counts(),
        )

    async def close(self) -> None:
        """End environments, tools and rewards."""
        for explorers in self._explorers:
            await explorers.close()
        await self._engine.close()
        self._publisher.close()
        for judge in self._judges:
            judge.close()
        self._receiver.close()

    async def _update(self, version: int) -> None:
        if isinstance(self._receiver, BroadcastReceiver):
            await asyncio.to_thread(self._receiver.fetch)  # rollouts go on meanwhile
        here = version if self._reads_itself else self._receiver.receive(trainable_parameters(self._policy))
        self._publisher.publish(here)

    def _make(self, text: str) -> Explorer:
        stage = self._stage_of(text)
        judge = build_stage_rewards(stage, self._policy, stage.rewards)
        self._judges.append(judge)
        if self._explorers:
            explorers = self._explorers[0].variant(stage, judge)
        else:
            precision, tasks = self._setup.precision, self._setup.tasks
            explorers = StageExplorers(stage, self._policy, self._engine, judge, precision=precision, tasks=tasks)
        self._explorers.append(explorers)
        return explorers.explorer(self._trace)

    def _stage_of(self, text: str) -> StageConfig:
        return StageConfig.model_validate_json(text).with_engine(self._kind.engine)


def _receiver(setup: WorkerSetup) -> WeightReceiver:
    """What takes the transport's weights."""
    match setup.weights:
        case "memory":
            return SharedMemoryReceiver(Path(setup.place))
        case "broadcast":
            return BroadcastReceiver(setup.place, device=setup.policy.device)
    return FolderReceiver(Path(setup.place))


def shift_spans(spans: list[Span], by: float) -> list[Span]:
    """Spans on another clock."""
    return [Span(each.kind, each.asked + by, each.started + by, each.ended + by) for each in spans]


def engine_reads_weights(stage: StageConfig, setup: WorkerSetup) -> bool:
    """Whether the explorer's engine reads what the trainer has sent: vLLM's process reads shared memory, where no
    adapters have to be merged before."""
    shared = setup.weights == "memory" and not has_lora(setup.policy.model)
    return shared and isinstance(stage.engine, VLLMEngineConfig) and uses_engine(stage)


def trainable_parameters(policy: PolicyModel) -> dict[str, Tensor]:
    """What an update changes, by name: all parameters, or adapters alone."""
    return {name: each.data for name, each in policy.model.named_parameters() if each.requires_grad}
