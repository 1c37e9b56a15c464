"""Remote explorers with the interface of local ones, whoever has launched them."""

from __future__ import annotations

import asyncio
import shutil
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch

from rollmill.config.engines import EngineConfig, NativeEngineConfig
from rollmill.config.rollout import SamplingConfig
from rollmill.config.run import StageConfig
from rollmill.engines.base import RolloutEngine
from rollmill.engines.native.build import build_native
from rollmill.errors import DeadlineError, RollmillError
from rollmill.models.load import PolicyModel
from rollmill.offload.plan import engine_leaves
from rollmill.orchestrator.context import ExplorerPool, RunContext
from rollmill.orchestrator.engine import shared_checksum
from rollmill.orchestrator.metrics import sum_metrics
from rollmill.progress import Progress, count_progress
from rollmill.remote.run_state import WEIGHTS
from rollmill.remote.stage_worker import RolloutReply, RolloutRequest, WorkerSetup, shift_spans, trainable_parameters
from rollmill.remote.worker_pool import WorkerPool
from rollmill.rewards.stage_rewards import StageRewards
from rollmill.rollout.base import OnGenerated, PartialRollout
from rollmill.rollout.draft_cache import DraftCache
from rollmill.trackers.trace import Trace
from rollmill.trainer.distributed.spec import strip_weights
from rollmill.types import Experience, Task
from rollmill.waiting import OUTAGES
from rollmill.weights import BroadcastSender, FolderSender, SharedMemorySender, WeightSender, shared_memory_folder
from rollmill.weights.cuda_ipc import IPCSender

if TYPE_CHECKING:
    from rollmill.orchestrator.stages import Stage


_KEEP_S = 1.0
_COUNT_S = 0.1
"""Pause between two questions of how many tokens count towards a budget."""
_ANSWER_S = 2.0
_IPC_S = 5.0
"""Limit for an explorer to come for weights by CUDA IPC, and to copy a bucket; afterwards it is not awaited."""
_OFFLOAD_S = 300.0
"""Limit for an explorer to free its device: the end of vLLM's process, or files of its weights."""


@dataclass(frozen=True)
class WeightTransport:
    """Transfer of new weights to explorers."""

    kind: Literal["memory", "folder", "broadcast"]
    folder: str = WEIGHTS  #: of `folder`; relative to the run directory, which may have another path on another host
    host: str = ""  #: address of the trainer's host, for `broadcast`
    nccl: bool = False
    engines: Sequence[EngineConfig | None] = ()  #: engine of each kind of explorer; None: the stage's


class ExplorerFleet(ExplorerPool, Protocol):
    """The explorers of a run, and what depends on who has launched them: Ray, or the user."""

    pool: WorkerPool
    transport: WeightTransport
    folder: Path  #: of an explorer's files; relative to the run directory where hosts may see that by another path

    @property
    def location(self) -> str:
        """Description of where they are, for the start of a stage."""
        ...

    @property
    def display_name(self) -> str:
        """Their name in `rollmill status`."""
        ...

    def share(self, setup: WorkerSetup) -> Any:
        """Make a stage's setup available to all workers; returns the argument of their `begin`."""

    def describe(self) -> str:
        """Describe the state of explorers, as a part of an error."""
        ...


class RemoteRollouts:
    """The run's explorers during one stage, as its rollout backend; they get the trainer's weights with every
    `publish`."""

    trains_in_thread = True
    uses_policy = False

    def __init__(self, stage: Stage, fleet: ExplorerFleet) -> None:
        self.generating = self
        config, policy, context = stage.config, stage.policy, stage.context
        self._policy, self._fleet, self._pool = policy, fleet, fleet.pool
        self._trainer = stage.trainer
        self.location = fleet.location
        self.version, self._tokens = -1, dict[tuple[str, int], int]()  # by explorer and its start
        self._last_part = -1
        self._metrics: list[dict[str, float]] = []
        self._counters: dict[tuple[str, int], dict[str, float]] = {}  # by explorer and its start, dead ones included
        self._device_bytes: dict[str, dict[str, int]] = {}  # by explorer
        self._name = uuid.uuid4().hex  # of this use of the explorers: earlier requests are dropped
        self._takes_ipc = set[str]()  # explorers that have answered since they were last awaited in vain
        self.engine, place, self._sender = self._open(stage)
        self._ipc = open_ipc(fleet.transport, context, policy, self._name)
        sent = policy
        if self._trainer.sharded_weights() is not None:  # weights in parts come by the transport only
            model: Any = strip_weights(policy.model)
            sent = replace(policy, model=model)
        examples = [task for task in stage.tasks.training.tasks if task.response is not None]
        self._setup = fleet.share(
            WorkerSetup(
                config.model_dump_json(),
                sent,
                context.precision,
                context.threads,
                list(context.plugins),
                examples,
                fleet.transport.kind,
                place,
                (config.offload and config.offload.folder) or fleet.folder,
                starts_offloaded=stage.offload_plan is not None and engine_leaves(stage.offload_plan, "train"),
                ipc=None if self._ipc is None else self._ipc.path,
            )
        )
        self._started: asyncio.Task[None] | None = None
        self._keeper: asyncio.Task[None] | None = None

    @property
    def display_name(self) -> str:
        """Names the explorers with their number, which may change."""
        return self._fleet.display_name

    @property
    def tokens_generated(self) -> int:
        """Tokens generated since the stage began, as far as explorers have reported; those of dead ones included."""
        return sum(self._tokens.values())

    async def wait_for_tokens(self) -> None:
        """Wait a moment, and ask all explorers for the number of tokens that they have generated."""
        await asyncio.sleep(_COUNT_S)
        found = await self._pool.ask("tokens_generated", self._name, timeout_s=_ANSWER_S)
        for name, tokens in found.items():
            self._count_tokens(name, tokens)

    def interrupt(self) -> None:
        """Interrupt all parts that were requested until now; they return with what they have. May be repeated: one may
        meanwhile have been requested of an explorer that took the place of a dead one."""
        self._pool.notify("interrupt", self._name, self._last_part)

    def next_part(self) -> int:
        """Return the number of a new request that `interrupt` applies to."""
        self._last_part += 1
        return self._last_part

    def _count_tokens(self, name: tuple[str, int], tokens: int) -> None:
        """Record how many tokens an explorer has generated; answers may arrive out of order."""
        before = self._tokens.get(name, 0)
        if tokens > before:
            self._tokens[name] = tokens
            count_progress(Progress.TOKENS)

    def _open(self, stage: Stage) -> tuple[RolloutEngine, str, WeightSender]:
        """Make this process's engine, which generates nothing, and the sender of weights and its place."""
        config, policy, context = stage.config, stage.policy, stage.context
        engine = build_native(NativeEngineConfig(), policy, config.rollout, context.precision)
        return engine, *open_transport(self._fleet.transport, config, context, policy, self._name)

    def publish(self, version: int) -> None:
        """Send the trainer's parameters, which are now those of `version`, to the explorers."""
        weights, ipc = self._trainer.sharded_weights() or trainable_parameters(self._policy), self._ipc
        awaited = self._takes_ipc & {each.name for each in self._pool.workers if each.ready}
        if ipc is not None and ipc.offer(version, weights, awaited):
            self._pool.notify("update", self._name, version)
            self._sender.send(version, weights, ipc)
            self._takes_ipc -= ipc.missed
            self._metrics += [{"explorer/ipc_fallbacks": float(len(ipc.missed))}] if ipc.missed else []
        else:
            self._sender.send(version, weights)
            if self._started is not None:
                self._pool.notify("update", self._name, version)
        self.version = version
        self._pool.reset_restart_budget()

    def finish_step(self, step: int) -> None:
        """No-op: models with `policy: past` are refused with explorers in other processes."""

    def explorer(
        self,
        config: StageConfig | None = None,
        rewards: StageRewards | None = None,
        *,
        trace: Trace | None = None,
        drafts: DraftCache | None = None,
    ) -> RemoteExplorer:
        """Build an explorer of the stage, or one with another workflow. Each process has rewards of its own, and the
        drafts of what it has rolled out."""
        return RemoteExplorer(self, "" if config is None else config.model_dump_json(), trace)

    async def roll_out(self, request: RolloutRequest) -> RolloutReply:
        """Have a group rolled out. Raises like Explorer.rollout; EngineError if explorers keep dying."""
        if self._started is None:
            self._started = asyncio.ensure_future(self._pool.begin(self._name, self._setup))
            self._keeper = asyncio.ensure_future(self._keep_weights())
        await asyncio.shield(self._started)
        name, reply = await self._pool.call("rollout", self._name, request)
        assert isinstance(reply, RolloutReply)
        count_progress(Progress.TOKENS)
        self._count_tokens(name, reply.tokens)
        self._takes_ipc |= {name[0]} if reply.takes_ipc else set()
        self._metrics += reply.metrics
        self._device_bytes[name[0]] = reply.device_bytes
        self._counters[name] = reply.counters
        for text in reply.told:
            OUTAGES.tell(f"{name[0]}: {text}")
        return reply

    async def offload(self) -> None:
        """Free every explorer's device until its next rollout. One that is lost meanwhile begins again without holding
        anything."""
        advice = "Is its disk very slow, or is it stopped? offload.engine: device leaves explorers as they are."
        self._takes_ipc.clear()  # what is offloaded is not told of versions
        found = await self._pool.order("offload", self._name, timeout_s=_OFFLOAD_S, advice=advice)
        for name, reply in found.items():
            self._device_bytes[name] = reply.device_bytes
            self._metrics.append(reply.metrics)

    def device_bytes(self) -> dict[str, int]:
        names = [each.name for each in self._pool.workers]
        held = {name: self._device_bytes.get(name, {}) for name in names}
        return {f"{name} {component}": size for name, sizes in held.items() for component, size in sizes.items()}

    async def _keep_weights(self) -> None:
        """Publish the weights again if somebody removes their folder: explorers may still need them."""
        while True:
            await asyncio.sleep(_KEEP_S)
            with suppress(RollmillError):  # `publish` will raise it
                self._sender.restore()

    def explain(self, error: DeadlineError) -> DeadlineError:
        advice = " ".join(filter(None, [self._fleet.describe(), error.advice]))
        return DeadlineError(error.waiter, error.owner, error.seconds, advice)

    def metrics(self) -> dict[str, float]:
        """Metrics of environments and tools since the last call, and the number of replaced explorers."""
        happened, self._metrics = self._metrics, []
        replaced, self._pool.replaced = self._pool.replaced, 0
        return sum_metrics(happened) | ({"explorer/replaced": float(replaced)} if replaced else {})

    def reward_counters(self) -> dict[str, float]:
        return sum_metrics(list(self._counters.values()))

    def state_dict(self) -> None:
        """Explorers have no state that a checkpoint needs."""

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Nothing to restore."""

    async def close(self) -> None:
        """Stop work at the end of the stage; may be called twice."""
        for task in (self._started, self._keeper):
            if task is not None:
                task.cancel()
        await self._pool.end(self._name)
        await self.engine.close()
        self._sender.close()
        if self._ipc is not None:
            self._ipc.close()


class RemoteExplorer:
    """Has groups rolled out by explorers in other processes. Their rewards arrive with their tokens."""

    is_remote = True

    def __init__(self, explorers: RemoteRollouts, stage: str, trace: Trace | None) -> None:
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
        version = self._explorers.version
        request = RolloutRequest(task, sampling, n, seed, group, version, with_greedy, self._stage)
        experiences = await self._roll_out(request)
        if generated is not None:
            generated(experiences)
        return experiences

    async def part(
        self,
        task: Task,
        sampling: SamplingConfig,
        *,
        n: int,
        seed: int,
        group: str,
        begun: Sequence[Experience] = (),
    ) -> PartialRollout:
        """Raises like `rollout`, since rewards are computed there, too."""
        version, part = self._explorers.version, self._explorers.next_part()
        request = RolloutRequest(task, sampling, n, seed, group, version, stage=self._stage, part=part, begun=[*begun])
        return PartialRollout(await self._roll_out(request))

    async def score_part(self, task: Task, sampling: SamplingConfig, part: PartialRollout) -> None:
        """No-op: rewards have arrived with the tokens."""

    async def _roll_out(self, request: RolloutRequest) -> list[Experience]:
        reply = await self._explorers.roll_out(request)
        if self._trace is not None:
            for span in shift_spans(reply.spans, time.perf_counter() - time.time()):
                self._trace.add(span.kind, span.requested, span.started, span.ended)
        self._counts.update(reply.counts)
        return reply.experiences

    def take_counts(self) -> dict[str, float]:
        counts, self._counts = self._counts, Counter()
        return dict(counts)


def open_transport(
    transport: WeightTransport, config: StageConfig, context: RunContext, policy: PolicyModel, name: str
) -> tuple[str, WeightSender]:
    """Create a new location for weights and their sender; leftovers of a dead trainer are removed."""
    dtype = torch.bfloat16 if context.precision == "bf16" else None
    if transport.kind == "memory":
        remove_stale_weights(context.run_id)
        place = shared_memory_folder() / f"rollmill-{context.run_id}-{name}"
        checksum = shared_checksum(config.with_engine(engine) for engine in transport.engines)
        return str(place), SharedMemorySender(place, trainable_parameters(policy), dtype=dtype, checksum=checksum)
    if transport.kind == "broadcast":
        device = policy.device if transport.nccl else None
        sender = BroadcastSender(transport.host, name, trainable_parameters(policy), dtype=dtype, device=device)
        return sender.address, sender
    relative = Path(transport.folder) / context.run_id
    folder = context.run_dir.absolute() / relative  # `relative` itself, if it is absolute
    shutil.rmtree(folder, ignore_errors=True)
    return str(relative / name), FolderSender(folder / name, trainable_parameters(policy), dtype=dtype)


def open_ipc(transport: WeightTransport, context: RunContext, policy: PolicyModel, name: str) -> IPCSender | None:
    """Make what offers weights on a GPU to explorers of this host; None: there is no GPU, or they are broadcast."""
    if policy.device.type != "cuda" or transport.kind == "broadcast":
        return None
    path = shared_memory_folder() / f"rollmill-{context.run_id}-{name}"
    return IPCSender(path, policy.device, join_s=_IPC_S, bucket_s=_IPC_S)


def remove_stale_weights(run_id: str) -> None:
    """Remove leftovers of a dead trainer in this host's shared memory."""
    for left in shared_memory_folder().glob(f"rollmill-{run_id}-*"):
        left.unlink(missing_ok=True)
