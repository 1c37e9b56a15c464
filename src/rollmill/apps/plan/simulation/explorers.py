"""Simulated explorers: the workers' own code in simulated processes, on Ray or as processes that join."""

from __future__ import annotations

import asyncio
import pickle
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rollmill.apps.plan.simulation.clock import SimulatedProcess, VirtualLoop
from rollmill.apps.plan.simulation.components import (
    SimulatedJudges,
    SimulatedPolicy,
    SimulatedReceiver,
    SimulatedRewards,
    SimulatedWeights,
)
from rollmill.apps.plan.simulation.engine import SimulatedEngine, SimulationCosts
from rollmill.apps.plan.simulation.history import EventHistory
from rollmill.apps.plan.simulation.network import SimulatedLink
from rollmill.config.placement import ExplorerSpec
from rollmill.config.rollout import RolloutConfig
from rollmill.orchestrator.rollouts import LocalRollouts
from rollmill.remote.connection import LOST, join_trainer, serve_calls
from rollmill.remote.explorer_worker import ExplorerWorker
from rollmill.remote.joined_explorers import JoinedExplorers
from rollmill.remote.rollouts import WeightTransport
from rollmill.remote.run_state import EXPLORER
from rollmill.remote.stage_worker import RolloutRequest, StageWorker, WorkerSetup
from rollmill.remote.worker_pool import WorkerLostError, WorkerPool
from rollmill.rollout import Explorer
from rollmill.rollout.auxiliary_models import AuxiliaryModels
from rollmill.trackers.trace import Trace
from rollmill.weights import InPlacePublisher

_TRAINER, _WORKER = 0, 1  # directions of a link, by the sender
_BOOT_S, _DETECT_S, _JOIN_AGAIN_S, _HANDSHAKE_S = 1.0, 0.2, 0.2, 60.0
_REPEATABLE = ("update", "rollout")
"""Calls that may arrive twice."""


@dataclass(frozen=True)
class SimulatedSite:
    """Parts that all simulated explorers share."""

    loop: VirtualLoop
    costs: SimulationCosts
    judges: SimulatedJudges
    weights: SimulatedWeights
    history: EventHistory
    max_sequences: int
    weights_delay_s: float = 0.0


class SilentHeartbeat:
    """A HeartbeatWriter that writes nothing."""

    def set_activity(self, doing: str, waits_for: str = "", *, version: int | None = None) -> None:
        """No-op: nobody reads it."""

    def close(self, ended: str) -> None:
        """No-op: nothing was written."""


class SimulatedRollouts(LocalRollouts):
    """Rollouts by a simulated engine, without workflows. The explorer is the real one."""

    def __init__(self, policy: Any, engine: Any, rewards: Any) -> None:
        self.engine = self.generating = engine
        self._policy, self._rewards, self._publisher = policy, rewards, InPlacePublisher(engine)
        self._models = AuxiliaryModels({}, policy, engine, RolloutConfig(), "fp32")
        self._trainer, self.uses_policy, self.trains_in_thread, self._opened = None, True, False, []

    def explorer(self, config: Any = None, rewards: Any = None, *, trace: Any = None, drafts: Any = None) -> Explorer:
        assert self._rewards is not None
        return Explorer(self.engine, self._rewards, self._policy.tokenizer, trace)


class SimulatedStageWorker(StageWorker):
    """A stage in an explorer's process with a simulated engine. Updates and requests run the real code."""

    def __init__(self, setup: WorkerSetup, site: SimulatedSite, process: SimulatedProcess) -> None:
        self._site, self._process, self._setup = site, process, setup
        self._start_id = len(site.history.events)  # identifies it among all
        self._policy: Any = SimulatedPolicy()
        self._reads_itself = self._takes_ipc = False
        self._ipc_counts = Counter[str]()
        self._receiver: Any = SimulatedReceiver(site.weights, setup.weights_address, site.loop, site.weights_delay_s)
        self._engine: Any = SimulatedEngine(
            process, site.costs, self._receiver.digests, max_sequences=site.max_sequences, shares_loop=False
        )
        self._version, self._updating, self._interrupted, self._restarts = -1, None, -1, 0.0
        self._parts: set[int] = set()
        self._memory = None
        self._trace = Trace()
        rewards: Any = SimulatedRewards(site.judges, process.outages)
        self._rewards = [rewards]
        self._rollouts = SimulatedRollouts(self._policy, self._engine, rewards)
        self._explorers = {"": self._rollouts.explorer(trace=self._trace)}

    async def rollout(self, request: RolloutRequest) -> Any:
        reply = await super().rollout(request)
        versions = [each.versions[each.action_mask] for each in reply.experiences]
        oldest = min((int(each.min()) for each in versions if each.size), default=-1)
        self._site.history.record(
            "rolled out", by=self._process.name, group=request.group, wanted=request.version, oldest=oldest
        )
        return reply

    async def _update(self, version: int) -> None:
        await super()._update(version)
        self._site.history.record("weights", by=self._process.name, version=self._version, start_id=self._start_id)

    def set_slowness(self, factor: float) -> None:
        """Change the factor of the seconds that its engine's passes take."""
        self._engine.set_slowness(factor)


@dataclass(eq=False)
class SimulatedNode:
    """A host with one explorer, which is started again when it ends.

    Args:
        skew: seconds by which its clock differs.
    """

    name: str
    site: SimulatedSite
    link: SimulatedLink
    skew: float = 0.0
    slowness: float = 1.0
    process: SimulatedProcess = field(init=False)
    worker: ExplorerWorker | None = field(default=None, init=False)
    calls: dict[asyncio.Future[Any], SimulatedProcess] = field(default_factory=dict, init=False)

    def start(self) -> None:
        self.process = SimulatedProcess(self.site.loop, self.name, skew=self.skew)
        self.process.slowness = self.slowness
        beat: Any = SilentHeartbeat()
        process = self.process

        def build(setup: WorkerSetup, kind: ExplorerSpec) -> StageWorker:
            return SimulatedStageWorker(setup, self.site, process)

        self.worker = ExplorerWorker(beat, ExplorerSpec(), build_stage=build, outages=process.outages)

    async def crash(self) -> None:
        """End the process as SIGKILL does; another one starts a second later."""
        if self.worker is None:
            return
        self.site.history.record("crash", process=self.name)
        self.worker = None
        self.link.break_streams()
        lost, self.calls = self.calls, {}
        self.site.loop.call_later(_DETECT_S, _fail, list(lost), "its process died")
        await self.process.kill()
        await asyncio.sleep(_BOOT_S)
        self.start()
        self.site.history.record("boot", process=self.name)

    def set_slowness(self, factor: float) -> None:
        """Change the speed of its engine."""
        self.slowness = self.process.slowness = factor
        stage = None if self.worker is None else self.worker._stage
        if isinstance(stage, SimulatedStageWorker):
            stage.set_slowness(factor)


def _fail(replies: list[asyncio.Future[Any]], why: str) -> None:
    for reply in replies:
        if not reply.done():
            reply.set_exception(WorkerLostError(why))


class SimulatedActorHandle:
    """Calls a node as a Ray actor; a WorkerHandle. Messages are pickled, as between processes."""

    restartable = True

    def __init__(self, node: SimulatedNode, caller: SimulatedProcess) -> None:
        self._node, self._caller = node, caller

    async def call(self, method: str, *arguments: Any) -> Any:
        node, reply = self._node, self._node.site.loop.create_future()
        if node.worker is None:
            raise WorkerLostError("its process is being started again")
        node.calls[reply] = node.process
        self._send(method, arguments, reply)
        try:
            return await reply
        finally:
            node.calls.pop(reply, None)

    def notify(self, method: str, *arguments: Any) -> None:
        if self._node.worker is not None:
            self._send(method, arguments, None)

    def kill(self) -> None:
        self._node.site.loop.create_task(self._node.crash())

    def _send(self, method: str, arguments: Any, reply: asyncio.Future[Any] | None) -> None:
        if not self._caller.alive:
            return
        node, payload = self._node, pickle.dumps(arguments)
        process = node.process
        times = 2 if method in _REPEATABLE and node.link.taken("duplicates") else 1
        for _ in range(times):
            node.link.send(lambda: self._deliver(process, method, payload, reply), _TRAINER)

    def _deliver(
        self, process: SimulatedProcess, method: str, payload: bytes, reply: asyncio.Future[Any] | None
    ) -> None:
        if process.alive and self._node.worker is not None:
            process.spawn(self._serve(self._node.worker, method, payload, reply))

    async def _serve(
        self, worker: ExplorerWorker, method: str, payload: bytes, reply: asyncio.Future[Any] | None
    ) -> None:
        work = asyncio.ensure_future(getattr(worker, method)(*pickle.loads(payload)))
        if reply is not None:  # cancelling the call cancels the method
            reply.add_done_callback(lambda done: done.cancelled() and work.cancel())
        error, result = None, b""
        try:
            result = pickle.dumps(await work)
        except Exception as raised:
            error = raised
        if reply is None:
            return
        lost = method == "rollout" and self._node.link.taken("breaks")

        def arrive() -> None:
            if reply.done():
                return
            if lost:
                reply.set_exception(WorkerLostError("its answer was lost"))
            elif error is not None:
                reply.set_exception(error)
            else:
                reply.set_result(pickle.loads(result))

        self._node.link.send(arrive, _WORKER)


class RayLikeFleet:
    """Nodes that are called as Ray's actors; an ExplorerFleet of one trainer process."""

    location, display_name, transport = "simulated explorers", "explorers", WeightTransport("folder")
    folder = Path()

    def __init__(
        self, nodes: list[SimulatedNode], trainer: SimulatedProcess, *, health_s: float, replacements: int
    ) -> None:
        self._nodes = nodes
        handles = {node.name: SimulatedActorHandle(node, trainer) for node in nodes}
        self.pool = WorkerPool(EXPLORER, dict(handles), health_s=health_s, replacements=replacements)

    def share(self, setup: WorkerSetup) -> WorkerSetup:
        return replace(setup, policy=None)

    def describe(self) -> str:
        return ""

    def serving(self, message: Callable[[str], None]) -> AbstractAsyncContextManager[None]:
        return nullcontext()

    def drop_requests(self) -> None:
        """Drop the requests of a dead trainer, as the supervisor does before it starts another one."""
        for node in self._nodes:
            if node.worker is not None:
                node.process.spawn(node.worker.end(""))


class JoiningFleet(JoinedExplorers):
    """Nodes that join the trainer over streams, and again whenever their stream ends."""

    def __init__(self, nodes: list[SimulatedNode], trainer: SimulatedProcess) -> None:
        super().__init__(Path("/nonexistent"), "simulated")
        self._trainer = trainer
        for number, node in enumerate(nodes):
            node.site.loop.create_task(self._keep_joined(number, node))

    def describe(self) -> str:
        return ""

    def drop_requests(self) -> None:
        """Explorers do so themselves when their stream ends."""

    async def _keep_joined(self, number: int, node: SimulatedNode) -> None:
        """Be the explorer's program (remote/explorer_process.py) in whichever process the node has."""
        while self._trainer.alive:
            if node.worker is not None:
                await asyncio.wait([node.process.spawn(self._join(number, node, node.worker))])
            await asyncio.sleep(_JOIN_AGAIN_S)

    async def _join(self, number: int, node: SimulatedNode, worker: ExplorerWorker) -> None:
        opened = asyncio.Event()
        node.link.send(opened.set, _WORKER)
        await opened.wait()
        if not self._trainer.alive:
            return
        theirs, (reader, writer) = node.link.connect(self._trainer, node.process)
        self._trainer.spawn(self.welcome(*theirs))
        try:
            async with asyncio.timeout(_HANDSHAKE_S):
                await join_trainer(reader, writer, self._key, number)
            await serve_calls(reader, writer, worker)
        except (TimeoutError, *LOST):
            return
        finally:
            writer.transport.abort()
            if node.process.alive:
                await worker.end("")
