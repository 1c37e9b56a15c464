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

from rollmill.config.engine import VLLMEngineConfig
from rollmill.config.engine_checks import generates
from rollmill.config.placement import ExplorerKind
from rollmill.config.rollout import SamplingConfig
from rollmill.config.run import StageConfig
from rollmill.core.registry import import_file
from rollmill.core.types import Experience, Task
from rollmill.explorer import Explorer
from rollmill.master.engine import make_engine, make_publisher
from rollmill.master.explorers import Explorers
from rollmill.master.measures import summed
from rollmill.master.stage_parts import judge_of
from rollmill.models.load import Policy
from rollmill.models.lora import has_lora
from rollmill.monitor.trace import Span, Trace
from rollmill.sync import BroadcastReceiver, FolderReceiver, InPlace, SharedReceiver, WeightPublisher, WeightReceiver


@dataclass(frozen=True)
class Setup:
    """All that an explorer is made of. Sections travel as JSON: users' parts are known only once plugins are loaded."""

    stage: str  #: the StageConfig
    policy: Policy  #: a copy; its trained weights come by the transport
    precision: str
    threads: int  #: of explorers whose kind does not say
    plugins: list[Path]
    tasks: list[Task]  #: what worked examples are chosen from
    weights: str  #: the transport: memory, folder or broadcast
    place: str  #: where it writes, or the address of the sender


@dataclass(frozen=True)
class Asked:
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
class Reply:
    """A group, and what has happened in the process since the reply before."""

    experiences: list[Experience]
    spans: list[Span]  #: in seconds since the epoch
    tokens: int
    metrics: list[dict[str, float]] = field(default_factory=list)
    counters: dict[str, float] = field(default_factory=dict)  #: of rewards, since the start of the process
    counts: dict[str, float] = field(default_factory=dict)  #: of rollouts by a workflow


class ExplorerActor:
    """One explorer, with the engine and the threads of its kind. Its methods are called from one event loop, which any
    number of groups share."""

    def __init__(self, setup: Setup, kind: ExplorerKind) -> None:
        self._kind = kind
        torch.set_num_threads(kind.threads or setup.threads)
        for plugin in setup.plugins:
            import_file(plugin)
        self._setup, self._policy = setup, setup.policy
        stage = self._stage_of(setup.stage)
        self._reads_itself = reads_itself(stage, setup)
        place = Path(setup.place) if self._reads_itself else None
        self._engine = make_engine(setup.policy, stage, setup.precision, place)
        self._engine.version = -1  # no weights have come
        self._publisher: WeightPublisher
        if self._reads_itself:
            self._publisher = InPlace(self._engine)
            setup.policy.model.to("meta")  # nobody here computes with it
        else:
            self._publisher = make_publisher(setup.policy, self._engine, setup.precision)
        self._trace = Trace()
        self._receiver = _receiver(setup)
        self._updating: asyncio.Task[None] | None = None
        self._explorers: list[Explorers] = []
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

    async def rollout(self, asked: Asked) -> Reply:
        """Roll out a group and judge it. Raises like Explorer.rollout, SyncError and DeadlineError."""
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
        return Reply(
            experiences,
            moved(self._trace.take(), offset),
            self._tokens - before,
            [each.metrics() for each in self._explorers],
            summed([judge.counters() for judge in self._judges]),
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
        here = version if self._reads_itself else self._receiver.receive(trained(self._policy))
        self._publisher.publish(here)

    def _make(self, text: str) -> Explorer:
        stage = self._stage_of(text)
        judge = judge_of(stage, self._policy, stage.rewards)
        self._judges.append(judge)
        if self._explorers:
            explorers = self._explorers[0].otherwise(stage, judge)
        else:
            precision, tasks = self._setup.precision, self._setup.tasks
            explorers = Explorers(stage, self._policy, self._engine, judge, precision=precision, tasks=tasks)
        self._explorers.append(explorers)
        return explorers.training(self._trace)

    def _stage_of(self, text: str) -> StageConfig:
        return StageConfig.model_validate_json(text).generated_by(self._kind.engine)


def _receiver(setup: Setup) -> WeightReceiver:
    """What takes the transport's weights."""
    match setup.weights:
        case "memory":
            return SharedReceiver(Path(setup.place))
        case "broadcast":
            return BroadcastReceiver(setup.place, device=setup.policy.device)
    return FolderReceiver(Path(setup.place))


def moved(spans: list[Span], by: float) -> list[Span]:
    """Spans on another clock."""
    return [Span(each.kind, each.asked + by, each.started + by, each.ended + by) for each in spans]


def reads_itself(stage: StageConfig, setup: Setup) -> bool:
    """Whether the explorer's engine reads what the trainer has sent: vLLM's process reads shared memory, where no
    adapters have to be merged before."""
    shared = setup.weights == "memory" and not has_lora(setup.policy.model)
    return shared and isinstance(stage.engine, VLLMEngineConfig) and generates(stage)


def trained(policy: Policy) -> dict[str, Tensor]:
    """What an update changes, by name: all parameters, or adapters alone."""
    return {name: each.data for name, each in policy.model.named_parameters() if each.requires_grad}
