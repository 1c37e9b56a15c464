"""One stage in an explorer process: rolls out into the shared buffer, follows the trainer's weights, evaluates."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from functools import partial

from rollmill.buffer import ExperienceKind, Group
from rollmill.buffer.base import PIPELINE, REMOTE_EXPLORER
from rollmill.buffer.sql import SqlStore
from rollmill.config.run import StageConfig
from rollmill.errors import DeadlineError, RollmillError
from rollmill.models.load import PolicyModel
from rollmill.orchestrator.batch_reader import oldest_allowed
from rollmill.orchestrator.batches import RolloutComponents, RolloutProducer
from rollmill.orchestrator.components import build_rollout_components, build_stage_rewards
from rollmill.orchestrator.context import RunContext
from rollmill.orchestrator.engine import build_engine, build_publisher
from rollmill.orchestrator.evaluation import Evaluation, Evaluator
from rollmill.orchestrator.explorers import StageExplorers
from rollmill.orchestrator.metrics import judging_metrics, sum_metrics
from rollmill.orchestrator.state import StageState
from rollmill.orchestrator.task_selection import StageTasks
from rollmill.remote.evaluation import POLL_S, EvaluationRequest, next_request
from rollmill.remote.explorer_worker import trainable_parameters
from rollmill.remote.run_state import TrainerStatus, read_trainer_status, run_state_lock, weights_folder
from rollmill.remote.worker_slots import WorkerSlot, WorkerState
from rollmill.seeds import derive_seed
from rollmill.trackers.heartbeat import HeartbeatWriter
from rollmill.trackers.trace import Trace
from rollmill.types import Experience
from rollmill.weights import FolderReceiver

SLOT_STREAM = 0x51  # keeps the task orders and random numbers of explorers apart
POLL_BUFFER_S = 0.25
"""Interval of checking the buffer for room that other processes made."""
WEIGHTS_DEADLINE_S = 10.0
"""Timeout for weights whose version exists, or did a moment ago."""


class SharedRolloutProducer(RolloutProducer):
    """A RolloutProducer beside others: the explorers share one pacing budget and one store."""

    def __init__(
        self, config: StageConfig, components: RolloutComponents, status: TrainerStatus, slot: WorkerSlot
    ) -> None:
        super().__init__(config, components)
        assert isinstance(components.store, SqlStore)
        self._shared = components.store
        self._status, self._slot, self._stage = status, slot, status.stage
        self._version, self._wasted = -1, 0
        self._looked = 0.0
        self.put = 0  #: groups to train on
        if (before := slot.load(self._stage)) is not None:
            self._go_on(before)

    def _go_on(self, doing: WorkerState) -> None:
        """Continue from the state of the slot's previous process; groups that it had stored are not repeated."""
        names = {self._rollouts.name_of(number): number for number, _ in doing.unfinished}
        there = {names[group.id] for group in self._shared.get(list(names))}
        unfinished = [each for each in doing.unfinished if each[0] not in there]
        assert doing.tasks is not None
        state = StageState(submitted=doing.submitted, tasks=doing.tasks, pipeline=doing.pipeline)
        self.restore(state)
        self._rollouts.start_again(unfinished)

    def start(self, version: int) -> None:
        """Start the rollouts that the pacing rule admits at weights `version`, over all explorers."""
        if version != self._version:
            self._version, self._wasted, self._looked = version, 0, 0.0
        if time.monotonic() - self._looked < POLL_BUFFER_S:
            return
        with run_state_lock(self._slot.run_dir):
            ahead = self._shared.ahead(version, min_version=oldest_allowed(self._config, version))
            if self._rollouts.start(version, ahead + self._slot.others(self._stage)):
                self._say()
        self._looked = time.monotonic()

    @property
    def oldest(self) -> asyncio.Future[list[Experience]] | None:
        """The group that passes the pipeline next."""
        first = self._queue.first(1)
        return first[0].future if first else None

    @property
    def under_way(self) -> int:
        """Number of groups that were started and are not verified."""
        return len(self._queue)

    async def verify(self) -> None:
        """Pass the oldest group through the pipeline, once it has rewards. Raises PipelineError if too many are
        dropped."""
        self._wasted += await self._verify_oldest(1, self._version)
        self._require_some(self._wasted)
        self._say()
        self._looked = 0.0

    def _put(self, groups: Sequence[Group]) -> None:
        """Store groups of this stage; the lock keeps the trainer from changing the stage meanwhile."""
        for group in groups:
            group.writer = (
                REMOTE_EXPLORER + self._config.name if group.writer in (self.writer, PIPELINE) else group.writer
            )
        with run_state_lock(self._slot.run_dir):
            if read_trainer_status(self._slot.run_dir) == self._status:
                self._shared.put(groups)
                self.put += sum(group.kind is ExperienceKind.ROLLOUT for group in groups)

    def _say(self) -> None:
        state = StageState()
        self.mark(state)
        self._slot.save(
            self._stage, WorkerState(self._rollouts.unfinished(), state.submitted, state.tasks, state.pipeline)
        )


class ExplorerStage:
    """A running stage in an explorer process.

    Args:
        status: the trainer's status on this stage.
    """

    def __init__(
        self,
        config: StageConfig,
        policy: PolicyModel,
        tasks: StageTasks,
        context: RunContext,
        *,
        status: TrainerStatus,
        slot: WorkerSlot,
        heartbeat: HeartbeatWriter,
    ) -> None:
        self._config, self._policy, self._context, self._heartbeat = config, policy, context, heartbeat
        self._stage, self._slot = status.stage, slot
        self._receiver = FolderReceiver(weights_folder(context.run_dir, status.stage), deadline_s=WEIGHTS_DEADLINE_S)
        self._rewards = build_stage_rewards(config, policy, config.rewards)
        self._engine = build_engine(policy, config, context.precision)
        self._publisher = build_publisher(policy, self._engine, context.precision)
        self._version: int | None = None
        self._explorers = StageExplorers(
            config, policy, self._engine, self._rewards, precision=context.precision, tasks=tasks.training.tasks
        )
        self._trace = Trace()
        self._production: SharedRolloutProducer | None = None
        if config.algorithm.uses_rollouts:
            seed = derive_seed(context.seed, status.stage)
            components = build_rollout_components(
                config,
                policy,
                tasks.training,
                explorer=self._explorers.explorer(self._trace),
                engine=self._engine,
                store=context.buffers.of_stage(config),
                trace=self._trace,
                first_version=status.first_version,
                seed=seed if slot.number == 0 else derive_seed(seed, SLOT_STREAM, slot.number),
                prefix=config.name if slot.number == 0 else f"{config.name}@{slot.number}",
            )
            self._production = SharedRolloutProducer(config, components, status, slot)
        self._evaluator: Evaluator | None = None
        if config.evaluation is not None:
            self._evaluator = Evaluator(
                config,
                tasks.held_out,
                rewards=self._rewards,
                explorers=self._explorers,
                build_rewards=partial(build_stage_rewards, config, policy),
                seed=context.seed,
            )
        self._generating: asyncio.Task[None] | None = None  # for an evaluation: the weights are kept until then
        self._evaluating: asyncio.Task[None] | None = None
        self._moved = time.monotonic()
        self._last_activity = ("", "")
        self._tokens, self._since = 0, time.perf_counter()

    @property
    def put(self) -> int:
        """Number of groups to train on that were put into the buffer."""
        return 0 if self._production is None else self._production.put

    async def turn(self) -> None:
        """Start due work, and wait a moment for running work.

        Raises:
            DeadlineError: no rollout has ended for rollout.deadline_s.
            RollmillError: a rollout failed, or the weights are damaged.
        """
        self._evaluate()
        if self._generating is None or self._generating.done():
            self._follow()
        if self._version is None:
            self._say(f"stage {self._config.name}", "the trainer's weights")
            await asyncio.sleep(POLL_S)
            return
        if self._production is not None:
            self._production.start(self._version)
        await self._something_happens()

    def _follow(self, version: int | None = None) -> None:
        """Switch to the newest weights, or those of `version`; running rollouts continue with them."""
        if version is None and not self._receiver.has_newer():
            return
        before, self._version = self._version, self._receiver.receive(trainable_parameters(self._policy), version)
        self._publisher.publish(self._version)
        if before is not None:
            self._note(before)

    def _note(self, version: int) -> None:
        """Record the metrics of a version."""
        tokens, self._tokens = self._engine.tokens_generated - self._tokens, self._engine.tokens_generated
        began, self._since = self._since, time.perf_counter()
        others = [] if self._evaluator is None else self._evaluator.metrics()
        metrics = {} if self._production is None else self._production.metrics()
        metrics |= judging_metrics(self._trace.take()) | sum_metrics([self._explorers.metrics(), *others])
        about = {"stage": self._config.name, "version": version, "seconds": self._since - began, "tokens": tokens}
        self._slot.note(about | metrics)

    async def _something_happens(self) -> None:
        """Wait for the oldest group's rewards and store the group, or until a moment has passed."""
        oldest = None if self._production is None else self._production.oldest
        count = 0 if self._production is None else self._production.under_way
        doing = "evaluate" if self._evaluating is not None else "roll out" if oldest is not None else "wait"
        waits = "" if doing != "wait" else "the trainer's next version"
        self._say(f"{doing} ({count} groups)" if count else doing, waits)
        if oldest is None or self._production is None:
            self._moved = time.monotonic()
            await asyncio.sleep(POLL_S)
            return
        await asyncio.wait([oldest], timeout=POLL_S)
        if oldest.done():
            await self._production.verify()
            self._moved = time.monotonic()
        elif time.monotonic() - self._moved > self._config.rollout.deadline_s:
            advice = "Raise rollout.deadline_s, lower rollout.max_new_tokens, or look for a reward that hangs."
            what = f"its engine and rewards ({count} groups are under way)"
            raise DeadlineError("the explorer", what, self._config.rollout.deadline_s, advice)

    def _say(self, doing: str, waits: str) -> None:
        if (doing, waits) != self._last_activity:
            self._last_activity = (doing, waits)
            self._heartbeat.set_activity(doing, waits, version=self._version)

    # -- evaluations -------------------------------------------------------------------------------------------

    def _evaluate(self) -> None:
        """Start a requested evaluation, one at a time."""
        if self._evaluating is not None and self._evaluating.done():
            self._evaluating.result()
            self._evaluating = self._generating = None
        if self._evaluator is None or self._evaluating is not None:
            return
        request = next_request(self._context.run_dir, self._stage)
        if request is None:
            return
        try:
            if request.version != self._version:
                self._follow(request.version)
        except DeadlineError as error:  # requested by a trainer that has ended since
            request.fail(error)
            request.close()
            return
        evaluation = self._evaluator.begin()
        request.begun()
        self._generating = asyncio.ensure_future(evaluation.generated())
        self._evaluating = asyncio.ensure_future(self._answer(request, evaluation, self._generating))

    async def _answer(self, request: EvaluationRequest, evaluation: Evaluation, generating: asyncio.Task[None]) -> None:
        """Write the result, unless the request is withdrawn."""
        result = asyncio.ensure_future(evaluation.result())
        try:
            while not result.done() and request.still_asked:
                await asyncio.wait([result], timeout=POLL_BUFFER_S)
            if result.done():
                request.answer(result.result())
        except RollmillError as error:
            request.fail(error)
        finally:
            result.cancel()
            await evaluation.cancel()  # stop a withdrawn evaluation
            await asyncio.gather(result, generating, return_exceptions=True)
            request.close()

    async def close(self) -> None:
        """Stop all running work."""
        if self._version is not None:
            self._note(self._version)
        if self._evaluating is not None:
            self._evaluating.cancel()
            await asyncio.gather(self._evaluating, return_exceptions=True)
        if self._production is not None:
            await self._production.close()
        if self._evaluator is not None:
            await self._evaluator.close()
        await self._explorers.close()
        await self._engine.close()
        self._publisher.close()
        self._rewards.close()
        self._receiver.close()
