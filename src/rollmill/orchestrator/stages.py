"""A running stage: its components, wired as the run file says, and its state between two steps."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from rollmill.buffer.sql import SQL
from rollmill.config.offload import Phase
from rollmill.config.run import StageConfig
from rollmill.data.examples import count_tasks
from rollmill.engines.base import RolloutEngine
from rollmill.models.load import PolicyModel
from rollmill.models.merged_checkpoint import stored_as_computed
from rollmill.offload import OffloadManager, OffloadPlan
from rollmill.offload.plan import engine_leaves
from rollmill.orchestrator.components import (
    build_rollouts,
    build_stage_pipeline,
    build_stage_rewards,
    build_trainer,
)
from rollmill.orchestrator.context import RunContext
from rollmill.orchestrator.evaluation import EvaluationResult
from rollmill.orchestrator.offline_data import OfflineData, build_demonstration_pool
from rollmill.orchestrator.offload import build_offload_plan, build_offloader
from rollmill.orchestrator.phases import MOVE, PhaseTrace
from rollmill.orchestrator.privileged_context import PrivilegedContext
from rollmill.orchestrator.rollouts import LocalRollouts, RolloutBackend
from rollmill.orchestrator.state import StageState
from rollmill.orchestrator.step_meter import StepMeter
from rollmill.orchestrator.task_pictures import TaskPictures
from rollmill.orchestrator.task_selection import StageTasks
from rollmill.progress import uncounted_work
from rollmill.rollout.draft_cache import DraftCache
from rollmill.seeds import derive_seed
from rollmill.types import Experience
from rollmill.weights.buckets import ShardedWeights

FROZEN, DRAFTS = "frozen", "drafts"
"""Keys of a trainer's state: the policy at the start of the stage, where a workflow talks to it; and drafts."""
_ACTIVITIES = {
    "rollout": "roll out",
    "reward": "reward",
    "inference": "inference",
    "train": "train",
    "eval": "evaluate",
}


class Stage:
    """The components of one stage and its state. `version` counts training steps over the whole run.

    Args:
        index: of the stage in the run.
        first_version: version of the weights when the stage began.
    """

    @uncounted_work()
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
        self.config, self.policy, self.tasks, self.context = config, policy, tasks, context
        self.index, self.first_version, self.seed = index, first_version, derive_seed(context.seed, index)
        self.state = StageState()
        self.updating = False  #: an update has begun and is not counted as a step yet: the weights are those of no step
        self.trace = PhaseTrace(self._report)
        self.rewards = None
        if config.rewards or config.domains or config.algorithm.uses_rollouts or config.evaluation is not None:
            self.rewards = build_stage_rewards(config, policy)
        # completions that come after their version has ended are compared with weights that the trainer keeps
        late = context.explorers is not None or not config.workflow.uses_tasks or config.sync_interval > 1
        kept_versions = config.max_staleness if late else 0
        self.trainer = build_trainer(config, policy, self.rewards, context, seed=self.seed, kept_versions=kept_versions)
        self.train_thread = ThreadPoolExecutor(1, "rollmill-trainer", torch.set_num_threads, (torch.get_num_threads(),))
        shown = [*tasks.training.tasks, *([] if tasks.examples is None else tasks.examples.tasks)]
        by_id = {task.id: task for task in shown}
        self.pictures = TaskPictures(policy, shown)
        self.privileged: PrivilegedContext | None = None
        if (options := config.algorithm.self_teacher) is not None:
            own = {task.id: task for task in tasks.training.tasks}
            self.privileged = PrivilegedContext(options, own, policy.tokenizer, policy.context)
        self.offload_plan: OffloadPlan | None = None
        if config.offload is not None:
            engines = None if context.explorers is None else context.engines
            self.offload_plan = build_offload_plan(config, policy, context.precision, engines)
        self.backend = self._open_backend()
        self._published = first_version
        self.backend.publish(first_version)
        self.offloader: OffloadManager | None = None
        if self.offload_plan is not None:
            self.offloader = build_offloader(self, self.offload_plan)
        self.trace.offloader, self.trace.explorers = self.offloader, self.backend.device_bytes
        self.store = context.buffers.of_stage(config)
        self.pipeline = build_stage_pipeline(config, policy, self.seed)
        self.offline_data: OfflineData | None = None
        if config.algorithm.uses_examples:
            pool = build_demonstration_pool(config, tasks.examples, policy, self.store, context.buffers, seed=self.seed)
            self.offline_data = OfflineData(pool, self.pipeline, self.store, config, policy, by_id)
        self.drafts = None if config.rollout.reuse is None else DraftCache(config.rollout.reuse)
        self.batches, self.evaluator = build_rollouts(self)
        self.meter = StepMeter(self)

    def _open_backend(self) -> RolloutBackend:
        explorers, rewards = self.context.explorers, self.rewards
        if explorers is not None and rewards is not None:
            return explorers.rollouts(self)
        precision, tasks = self.context.precision, self.tasks.training.tasks
        return LocalRollouts(self.config, self.policy, rewards, precision=precision, tasks=tasks, trainer=self.trainer)

    @property
    def version(self) -> int:
        """Version of the weights now."""
        return self.first_version + self.state.step

    @property
    def done(self) -> bool:
        """True if all steps are made, or the stage was ended early."""
        return self.state.step >= self.config.steps or self.state.stopped

    @property
    def engine(self) -> RolloutEngine:
        """The engine of this process."""
        return self.backend.engine

    def describe(self) -> list[str]:
        """Messages for the start of the stage: its size, where rollouts are made, what moves when, tasks left out."""
        config = self.config
        count = count_tasks(config, self.tasks.training, self.tasks.examples)
        first = (
            f"stage {config.name}: {config.algorithm.name}, {config.steps} steps, {count.tasks} tasks loaded, "
            f"{count.describe_left_out()}{count.describe_examples()}"
        )
        offload = [] if self.offloader is None else [self.offloader.plan.describe()]
        return [first, *filter(None, [self.backend.location]), *offload, *self.tasks.notes]

    # -- between two steps -------------------------------------------------------------------------------------

    def begin(self, stores: dict[str, dict[str, Any]]) -> None:
        """Start from the first step; `stores` says where buffers were at the end of the stage before."""
        self.trainer.start(keeps_policy=self.backend.uses_policy)
        self.state.stores = stores
        self._rewind()
        if self.store.kind == SQL:
            self.store.put_tasks(self.tasks.training.tasks)
        self._mark_boundary()

    def restore(self, state: StageState, trainer: dict[str, Any]) -> None:
        """Go on from a checkpoint; the model's weights are loaded already."""
        self.trainer.start(keeps_policy=self.backend.uses_policy)
        self.state = state
        self._rewind()
        if self.offline_data is not None and state.experts is not None:
            self.offline_data.pool.load_state_dict(state.experts)
        self.pipeline.load_state_dict(state.pipeline)
        if self.batches is not None:
            self.batches.restore(state)
        own = {key: value for key, value in trainer.items() if key not in (FROZEN, DRAFTS)}
        self.trainer.load_state_dict(own)
        self.backend.load_state_dict(trainer.get(FROZEN))
        if self.drafts is not None:
            self.drafts.load_state_dict(trainer[DRAFTS])
        self.publish()
        self._mark_boundary()

    def learn(self, batch: Sequence[Experience], upcoming: Sequence[Sequence[Experience]] = ()) -> dict[str, float]:
        """Make the optimizer steps of one batch, in any thread; `finish_step` has to follow.

        Args:
            upcoming: completions of later steps, batch by batch; the log-probs of some are compared with the engine's.

        Returns the trainer's metrics. Raises TrainingError.
        """
        self.updating = True  # and stays so after an error
        for each in (batch, *upcoming):
            self.pictures.attach(each)
        shown = {} if self.privileged is None else self.privileged.give(batch)
        compared = self.trainer.to_compare(upcoming, batch, self.version)
        return self.trainer.step(batch, self.version, compared) | shown

    def finish_step(self) -> None:
        """Count a step whose update was made, and publish its weights if they are due (`sync_interval`)."""
        self.state.step += 1
        self.updating = False
        if self.state.step % self.config.sync_interval == 0:
            self.publish()
        self.backend.finish_step(self.state.step)
        if self.batches is not None:
            self.batches.mark_trained(self.version)
        self._mark_boundary()

    async def offload_other_processes(self, phase: Phase) -> None:
        """Wait until an engine in a process of its own has ended, or explorers in other processes have freed what they
        hold, if the offload plan says so for this phase."""
        if self.offload_plan is None or not engine_leaves(self.offload_plan, phase):
            return
        began = time.perf_counter()
        await self.backend.offload()
        self.trace.add(MOVE, began, began, time.perf_counter())

    def publish(self) -> None:
        """Publish the current weights, and note their version."""
        self._published = self.version
        self.backend.publish(self.version)

    def sync_weights(self) -> None:
        """Publish the current weights unless engines have them: they are evaluated next."""
        if self._published != self.version:
            self.trace.enter("train")  # the weights may be offloaded
            self.publish()

    def _rewind(self) -> None:
        """Bring the buffer back to where it was when the stage was where it is now."""
        self.store.rewind(self.state.stores.get(self.store.kind), step=self.version)

    def _mark_boundary(self) -> None:
        """Remember where the stage is between two steps: what a checkpoint stores even if the next step has begun.

        Rollouts of the next step change sampler, queue, buffer, pipeline and demonstrations, so these are copied here.
        Only an update changes weights and optimizer; `trainer_state` reads them when a checkpoint is written, which
        `updating` forbids after an update that failed. `snapshot` adds the rewards of finished rollouts.
        """
        self.state.experts = None if self.offline_data is None else self.offline_data.pool.state_dict()
        self.state.pipeline = self.pipeline.state_dict()
        if self.drafts is not None:
            self.drafts.mark()
        if self.batches is not None:
            self.batches.mark(self.state)
        mark = self.store.mark()
        self.state.stores = {**self.state.stores, mark["store"]: mark}

    async def snapshot(self) -> StageState:
        """Return the state at the last step boundary; waits for rewards of rollouts that have finished."""
        if self.batches is not None:
            await self.batches.snapshot(self.state)
        return self.state

    def trainer_state(self) -> dict[str, Any]:
        """Optimizer, schedule and random state; and what is too large for the stage's state: frozen weights, drafts."""
        self.trace.enter("train")
        frozen = self.backend.state_dict()
        drafts = None if self.drafts is None else self.drafts.state_dict()
        others = {key: value for key, value in ((FROZEN, frozen), (DRAFTS, drafts)) if value is not None}
        trainer = self.trainer.state_dict()
        return (trainer if self.offloader is None else self.offloader.whole(trainer)) | others

    def load_for_export(self) -> ShardedWeights | None:
        """Bring the policy, and what is trained, to where they can be written.

        Returns the policy's weights if ranks hold parts of them, to be gathered while they are written.
        """
        self.trace.enter("train")
        weights = self.trainer.sharded_weights()
        if weights is not None and stored_as_computed(self.policy.model):
            return weights
        self.trainer.gather_policy()
        return None

    # -- beside the steps --------------------------------------------------------------------------------------

    async def evaluate(self, *, is_complete: bool = False) -> EvaluationResult:
        """Evaluate alone, and wait for it; see `Evaluator.begin`. Raises like `Evaluation.result`."""
        assert self.evaluator is not None, "the capability check asks for rewards where there is an evaluation"
        self.sync_weights()
        self.trace.enter("rollout")
        self._report("eval", "completions of held-out tasks, and their rewards")
        return await self.evaluator.evaluate(is_complete=is_complete)

    def _report(self, kind: str, waits_for: str) -> None:
        """Tell `rollmill status` what goes on."""
        step = f"step {self.state.step + 1} of {self.config.steps}"
        where = f"after step {self.state.step}" if kind == "eval" else step
        activity = f"{_ACTIVITIES[kind]}, {where}, stage {self.config.name}"
        self.context.set_activity(activity, waits_for, version=self.version)

    async def close(self) -> None:
        self.trainer.close()
        self.train_thread.shutdown()
        if self.batches is not None:
            await self.batches.close()
        self.pipeline.close()
        if self.evaluator is not None:
            self.evaluator.close()
        await self.backend.close()
        if self.offloader is not None:
            self.offloader.close()
        if self.rewards is not None:
            self.rewards.close()
