"""One stage: the components it needs, wired, and its training step.

    supply (rollouts, verified) + replayed + experts -> trainer -> publish weights

The explorer finishes generating before the trainer starts, because both use the same cores and the same parameters;
with max_staleness 1 or more, rewards of later batches are computed while the trainer works.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rollmill.buffer import DemonstrationPool
from rollmill.buffer.ratings import RatingOverrides
from rollmill.buffer.sql import SQL
from rollmill.config.algorithm import OfflineAlgorithmOptions
from rollmill.config.placement import RayPlacement
from rollmill.config.run import StageConfig
from rollmill.config.workflows import TrafficWorkflow
from rollmill.engines.base import RolloutEngine
from rollmill.engines.native import NativeEngine
from rollmill.engines.vllm.engine import VLLMEngine
from rollmill.errors import StoreError
from rollmill.models.load import PolicyModel
from rollmill.offload import OffloadManager
from rollmill.orchestrator.batches import BatchSource
from rollmill.orchestrator.context import RunContext
from rollmill.orchestrator.engine import build_engine, build_native_engine, build_publisher
from rollmill.orchestrator.evaluation import EvaluationResult, Evaluator
from rollmill.orchestrator.experts import build_expert_pool
from rollmill.orchestrator.explorers import StageExplorers
from rollmill.orchestrator.learner import Learner
from rollmill.orchestrator.metrics import (
    PHASES,
    batch_metrics,
    drafting_metrics,
    engine_metrics,
    judging_metrics,
    require_rewards,
    seconds_of,
    sum_metrics,
)
from rollmill.orchestrator.offload import build_offloader
from rollmill.orchestrator.phases import MOVE, PhaseTrace
from rollmill.orchestrator.stages import build_batches, build_rollout_components, build_stage_rewards
from rollmill.orchestrator.state import StageState
from rollmill.orchestrator.task_selection import StageTasks
from rollmill.recipes.mix import MixedOptions
from rollmill.remote.evaluation import RemoteEvaluator
from rollmill.remote.explorers import RemoteExplorers
from rollmill.rewards import RewardManager
from rollmill.rollout.draft_cache import DraftCache
from rollmill.seeds import derive_seed
from rollmill.serve.traffic import TrafficBatches
from rollmill.trackers.trace import Span
from rollmill.trainer import Trainer
from rollmill.types import Experience
from rollmill.weights import WeightPublisher

_TURNS = 5
_DOING = {"rollout": "roll out", "reward": "reward", "inference": "inference", "train": "train", "eval": "evaluate"}
FROZEN, DRAFTS = "frozen", "drafts"
"""Keys of a trainer's state: the policy at the start of the stage, where a workflow talks to it; and drafts."""


@dataclass(slots=True)
class StepResult:
    """What one training step gave."""

    metrics: dict[str, Any]
    experiences: list[Experience]
    generated_tokens: int
    began: float
    seconds: dict[str, float] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)


class TrainingLoop:
    """The running stage. `version` counts training steps over the whole run; pacing counts those of the stage."""

    def __init__(
        self,
        config: StageConfig,
        policy: PolicyModel,
        tasks: StageTasks,
        context: RunContext,
        *,
        index: int,
        first_version: int,
    ) -> None:
        self.config = config
        self.tasks = tasks
        self.state = StageState()
        self._policy = policy
        self._context = context
        self._index, self._seed = index, derive_seed(context.seed, index)
        self._first_version = first_version
        self._trace = PhaseTrace(self._says)
        self._judge: RewardManager | None = None
        if config.rewards or config.algorithm.uses_rollouts or config.evaluation is not None:
            self._judge = build_stage_rewards(config, policy, config.rewards)
        self._learning = Learner(
            config,
            policy,
            self._judge,
            context,
            tasks.training.tasks,
            seed=self._seed,
            kept_versions=self._kept_versions,
        )
        self._remote: RemoteExplorers | None = None
        self._engine: RolloutEngine
        self._sync: WeightPublisher | RemoteExplorers
        self._engine, self._sync = self._connect()
        self._sync.publish(first_version)
        self._residency = self._trace.residency = self._residency_of()
        self._counted: Counter[str] = Counter()
        self._engine_counted: dict[str, float] = {}  # at the end of the last step
        self._store = context.buffers.of_stage(config)
        self._experts: DemonstrationPool | None = None
        if config.algorithm.uses_examples:
            self._experts = build_expert_pool(
                config, tasks.experts, policy, self._store, context.buffers, seed=self._seed
            )
        reuse = config.rollout.reuse
        self._drafts = None if reuse is None else DraftCache(reuse)
        self._supply: BatchSource | None = None
        self.evaluator: Evaluator | RemoteEvaluator | None = None
        self._explorers: StageExplorers | RemoteExplorers | None = None
        if self._judge is not None:
            self._explore(self._judge)

    @property
    def _kept_versions(self) -> int:
        """How many earlier versions of the weights the trainer keeps, to compare completions that come after their
        version has ended: those of remote explorers and of applications."""
        late = isinstance(self._context.placement, RayPlacement) or isinstance(self.config.workflow, TrafficWorkflow)
        return self.config.max_staleness if late else 0

    def _connect(self) -> tuple[RolloutEngine, WeightPublisher | RemoteExplorers]:
        """What generates, and how the trainer's weights get there."""
        config, policy, context = self.config, self._policy, self._context
        if isinstance(context.placement, RayPlacement) and self._judge is not None:
            self._remote = RemoteExplorers(config, policy, context, self.tasks.training.tasks)
            return build_native_engine(policy, config.rollout, context.precision), self._remote
        engine = build_engine(policy, config, context.precision)
        return engine, build_publisher(policy, engine, context.precision)

    def _explore(self, judge: RewardManager) -> None:
        """Make what rolls out, for training and for evaluations."""
        config, policy, context, tasks = self.config, self._policy, self._context, self.tasks
        self._explorers = self._remote or StageExplorers(
            config, policy, self._engine, judge, precision=context.precision, tasks=tasks.training.tasks
        )
        if config.algorithm.uses_rollouts:
            version, seed = self._first_version, self._seed
            line = build_rollout_components(
                config,
                policy,
                tasks.training,
                explorer=self._explorers.training(self._trace, self._drafts),
                engine=self._rolls_out,
                store=self._store,
                trace=self._trace,
                first_version=version,
                seed=seed,
            )
            ratings = RatingOverrides(context.buffers.of_run(self._store))
            self._supply = build_batches(config, line, ratings, first_version=version, seed=seed)
        if config.evaluation is not None:
            self.evaluator = Evaluator(
                config,
                tasks.held_out,
                judge=judge,
                explorers=self._explorers,
                make_judge=partial(build_stage_rewards, config, policy),
                seed=context.seed,
            )

    def _residency_of(self) -> OffloadManager | None:
        if self.config.residency is None:
            return None
        trainer = self._learning.trainer
        assert isinstance(trainer, Trainer)
        assert isinstance(self._engine, NativeEngine)
        return build_offloader(self.config, self._policy, trainer, self._engine, self._context)

    @property
    def policy(self) -> PolicyModel:
        """What is trained."""
        return self._policy

    @property
    def _rolls_out(self) -> RolloutEngine | RemoteExplorers:
        """What counts the tokens that are generated."""
        return self._remote or self._engine

    @property
    def elsewhere(self) -> str:
        """Where explorers are, in words; nothing if they are in this process."""
        return "" if self._remote is None else self._remote.where

    @property
    def engine(self) -> RolloutEngine:
        """What rolls out."""
        return self._engine

    @property
    def online(self) -> TrafficBatches:
        """Takes groups that an application has made."""
        assert isinstance(self._supply, TrafficBatches)
        return self._supply

    @property
    def version(self) -> int:
        """Version of the weights now."""
        return self._first_version + self.state.step

    # -- one training step -------------------------------------------------------------------------------------

    async def collect(self, beside: bool = False) -> list[Experience]:
        """The experiences of the next step. While rewards are awaited, the trainer's inference goes on.

        Args:
            beside: an evaluation shares the engine, so that rollouts take longer.
        """
        algorithm, supply = self.config.algorithm, self._supply
        if supply is None:
            assert isinstance(algorithm, OfflineAlgorithmOptions)
            return self._demonstrations(algorithm.batch)
        whom = "the engine" if self._remote is None else self._remote.where
        with self._trace.record_span("rollout", f"{whom} to finish its completions"):
            await supply.roll_out(self.version, deadlines=2 if beside else 1)
        others = supply.again(self.version)
        if isinstance(algorithm, MixedOptions):
            usual = self.config.rollout.batch * self.config.rollout.group_size
            others = others + self._demonstrations(math.ceil(algorithm.expert_ratio * usual))
        if not (beside and self._residency is not None):  # the engine is still at work on the evaluation
            await self._infer(supply, others)
        return await supply.collect(self.version) + others

    async def _infer(self, supply: BatchSource, others: list[Experience]) -> None:
        """The trainer's passes over the next batch that need no rewards."""
        batch = None
        for _ in range(_TURNS):  # of the event loop, until the explorer has seen that its completions have ended
            await asyncio.sleep(0)
            batch = batch or supply.known()
        if batch is None:
            return
        with self._trace.record_span("inference"):
            for _ in self._learning.ahead(batch + others, self.version):
                await asyncio.sleep(0)

    def _infer_rest(self, experiences: list[Experience]) -> None:
        """Where components come and go, all passes are made in their phase, before the weights are updated."""
        if self._residency is None:
            return
        with self._trace.record_span("inference"):
            for _ in self._learning.ahead(experiences, self.version):
                pass

    def _demonstrations(self, count: int) -> list[Experience]:
        assert self._experts is not None
        found = self._experts.draw(count, step=self.state.step)
        if not found and self._supply is None:
            names = ", ".join(self.config.experts.sources)
            raise StoreError(
                f"stage {self.config.name}: nothing to learn from in experts.sources ({names}); give feedback first "
                "(`rollmill feedback`), or name other sources"
            )
        return found

    def learn(self, experiences: list[Experience]) -> dict[str, float]:
        """Update the weights and publish them; the trainer's metrics."""
        return self._learned(self._learning.step(experiences, self.version, self._upcoming()))

    async def _learn_beside(self, experiences: list[Experience]) -> dict[str, float]:
        """`learn` while requests are taken and explorers are answered; an engine of this process rests, since it has
        the same weights."""
        self._engine.pause()
        try:
            await self._engine.drain()
            return self._learned(await self._learning.step_beside(experiences, self.version, self._upcoming()))
        finally:
            self._engine.resume()

    def _upcoming(self) -> list[list[Experience]]:
        return [] if self._supply is None else self._supply.upcoming()

    def _learned(self, metrics: dict[str, float]) -> dict[str, float]:
        """Publish the weights of a step that was made."""
        self.state.step += 1
        self._sync.publish(self.version)
        if self._supply is not None:
            self._supply.learned(self.version)
        self._mark_boundary()
        return metrics

    async def step(self, before_update: Callable[[], Awaitable[None]] | None = None) -> StepResult:
        """collect, then learn.

        Args:
            before_update: waits for what needs the weights as they are besides the step: an evaluation.
        """
        started, tokens = time.perf_counter(), self._rolls_out.tokens_generated
        drafted = self._engine.counters()
        experiences = await self.collect(before_update is not None)
        if before_update is not None:
            await before_update()
        generated = self._rolls_out.tokens_generated - tokens
        require_rewards(experiences, f"stage {self.config.name}, step {self.state.step + 1}")
        staleness = self.version
        self._infer_rest(experiences)
        if isinstance(self._engine, VLLMEngine) and self._engine.sleeps:
            await self._engine.sleep()
        with self._trace.record_span("train"):
            beside = isinstance(self.config.workflow, TrafficWorkflow) or self._remote is not None
            learned = await self._learn_beside(experiences) if beside else self.learn(experiences)
            metrics: dict[str, Any] = batch_metrics(experiences, staleness) | learned
        total = time.perf_counter() - started  # evaluation and checkpoints come on top
        spans = self._trace.take()
        kinds = {span.kind for span in spans}
        seconds = {phase: seconds_of(spans, phase) for phase in (*PHASES, MOVE) if phase in kinds}
        metrics |= judging_metrics(spans) | self._newly_counted()
        engine, since = self._engine.counters(), self._engine_counted
        metrics |= drafting_metrics(drafted, engine, generated) | engine_metrics(since, engine)
        self._engine_counted = engine
        metrics |= {} if self._supply is None else self._supply.metrics()
        metrics |= self._happened()
        metrics |= {} if self._residency is None else self._residency.metrics()
        return StepResult(metrics, experiences, generated, started, seconds | {"total": total}, spans)

    @property
    def awaits_all_rewards(self) -> bool:
        """Whether those of an evaluation have to be there before the update, since reward models leave then."""
        return self._residency is not None

    def describe_residency(self) -> list[str]:
        """What moves when, as far as anything does."""
        return [] if self._residency is None else [self._residency.plan.describe()]

    async def evaluate(self) -> EvaluationResult:
        """Evaluate alone, and wait for it. Raises like `Evaluation.result`."""
        assert self.evaluator is not None, "the capability check asks for rewards where there is an evaluation"
        self._trace.enter("rollout")
        self._says("eval", "completions of held-out tasks, and their rewards")
        return await self.evaluator.evaluate()

    def gather(self) -> None:
        """The policy is where it can be written, and what is trained, too."""
        self._trace.enter("train")

    def record_span(self, phase: str, waits_for: str = "") -> AbstractContextManager[None]:
        """Counts what happens inside as seconds of a phase of the step."""
        return self._trace.record_span(phase, waits_for)

    def _says(self, kind: str, waits_for: str) -> None:
        step = f"step {self.state.step + 1} of {self.config.steps}"
        where = f"after step {self.state.step}" if kind == "eval" else step
        doing = f"{_DOING[kind]}, {where}, stage {self.config.name}"
        self._context.set_activity(doing, waits_for, version=self.version)

    def _happened(self) -> dict[str, float]:
        """What has happened in environments and tools since the step before, evaluations included."""
        if self._explorers is None:
            return {}
        others = [] if self.evaluator is None else self.evaluator.metrics()
        return sum_metrics([self._explorers.metrics(), *others])

    def _newly_counted(self) -> dict[str, float]:
        """What the judge's rewards have counted since the step before."""
        judge = self._remote or self._judge
        counted = Counter({} if judge is None else judge.counters())
        for each in [] if self.evaluator is None else self.evaluator.counters():
            counted.update(each)
        before, self._counted = self._counted, counted
        return {f"judging/{key}": value - before.get(key, 0.0) for key, value in counted.items()}

    # -- checkpoints -------------------------------------------------------------------------------------------

    def _mark_boundary(self) -> None:
        """Remember where the stage is between two steps: what a checkpoint stores even if the next step has begun."""
        self.state.experts = None if self._experts is None else self._experts.state_dict()
        if self._drafts is not None:
            self._drafts.mark()
        if self._supply is not None:
            self._supply.mark(self.state)
        mark = self._store.mark()
        self.state.stores = {**self.state.stores, mark["store"]: mark}

    async def snapshot(self) -> StageState:
        """The stage's state at the last step boundary; waits for rewards of rollouts that have finished."""
        if self._supply is not None:
            await self._supply.snapshot(self.state)
        return self.state

    def trainer_state(self) -> dict[str, Any]:
        """Optimizer, schedule and random state; frozen weights, where a workflow has them; and drafts, which are too
        large for the stage's state."""
        self.gather()
        frozen = None if self._explorers is None else self._explorers.state_dict()
        drafts = None if self._drafts is None else self._drafts.state_dict()
        others = {key: value for key, value in ((FROZEN, frozen), (DRAFTS, drafts)) if value is not None}
        trainer = self._learning.trainer.state_dict()
        return (trainer if self._residency is None else self._residency.whole(trainer)) | others

    def export(self, folder: Path) -> None:
        """Write into a checkpoint's folder what the stage makes besides the policy."""
        self._learning.export(folder)

    def begin(self, stores: dict[str, dict[str, Any]]) -> None:
        """Start from the first step; `stores` says where buffers were at the end of the stage before."""
        self._learning.begin()
        self.state.stores = stores
        self._rewind()
        if self._store.kind == SQL:
            self._store.put_tasks(self.tasks.training.tasks)
        self._mark_boundary()

    def _rewind(self) -> None:
        """The buffer as it was when the stage was where it is now."""
        self._store.rewind(self.state.stores.get(self._store.kind), step=self.version)

    def restore(self, state: StageState, trainer: dict[str, Any]) -> None:
        """Go on from a checkpoint; the model's weights are loaded already."""
        self._learning.begin()
        self.state = state
        self._rewind()
        if self._experts is not None and state.experts is not None:
            self._experts.load_state_dict(state.experts)
        if self._supply is not None:
            self._supply.restore(state)
        own = {key: value for key, value in trainer.items() if key not in (FROZEN, DRAFTS)}
        self._learning.trainer.load_state_dict(own)
        if self._explorers is not None:
            self._explorers.load_state_dict(trainer.get(FROZEN))
        if self._drafts is not None:
            self._drafts.load_state_dict(trainer[DRAFTS])
        self._sync.publish(self.version)
        self._mark_boundary()

    async def close(self) -> None:
        """Stop what is running."""
        self._learning.close()
        if self._supply is not None:
            await self._supply.close()
        if self.evaluator is not None:
            await self.evaluator.close()
        if self._explorers is not None:
            await self._explorers.close()
        await self._engine.close()
        if self._residency is not None:
            self._residency.close()
        if not isinstance(self._sync, RemoteExplorers):
            self._sync.close()
        if self._judge is not None:
            self._judge.close()


MakeLoop = Callable[..., TrainingLoop]
"""TrainingLoop, or what has the same arguments."""
