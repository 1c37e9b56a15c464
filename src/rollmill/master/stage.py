"""One stage: the components it needs, wired, and its training step.

    admit tasks (pacing) -> explorer -> queue -> trainer -> publish weights

The explorer finishes generating before the trainer starts, because both use the same cores and the same parameters;
with max_staleness 1 or more, rewards of later batches are computed while the trainer works.
"""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from rollmill.algorithms import build_recipe
from rollmill.buffer import GroupQueue
from rollmill.config.algorithm import DemonstrationOptions
from rollmill.config.run import StageConfig
from rollmill.config.trainer import TrainerConfig
from rollmill.core.errors import DeadlineError
from rollmill.core.types import Experience, Task
from rollmill.engines.native import NativeEngine
from rollmill.engines.native.rng import fold
from rollmill.explorer import Explorer
from rollmill.master.evaluation import Evaluator
from rollmill.master.measures import PHASES, batch_metrics, judging_metrics, require_rewards, seconds_of
from rollmill.master.pacing import Pacing
from rollmill.master.selection import StageTasks
from rollmill.master.state import StageState
from rollmill.models.classifier import REWARD_MODEL, save_classifier
from rollmill.models.load import Policy, load_teacher
from rollmill.monitor.codec import decode_experience, encode_experience
from rollmill.monitor.trace import Span, Trace
from rollmill.recipes import Distill, RewardModel
from rollmill.recipes.mix import Mixed
from rollmill.rewards import Judge, build_judge
from rollmill.sync import InPlace
from rollmill.tasks import Sampler, expert_experience, preference_pair
from rollmill.trainer import ScoreTrainer, Trainer

EXPERT_STREAM = 0xE4
_TURNS = 5


@dataclass(slots=True)
class StepResult:
    """What one training step gave."""

    metrics: dict[str, Any]
    experiences: list[Experience]
    generated_tokens: int
    began: float
    seconds: dict[str, float] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)


class StageRun:
    """The running stage. `version` counts training steps over the whole run; pacing counts those of the stage."""

    def __init__(
        self,
        config: StageConfig,
        policy: Policy,
        tasks: StageTasks,
        *,
        index: int,
        seed: int,
        first_version: int,
        precision: str,
    ) -> None:
        self.config = config
        self.tasks = tasks
        self.state = StageState()
        self._policy = policy
        self._seed = fold(seed, index)
        self._first_version = first_version
        self._uses_rollouts = config.algorithm.uses_rollouts
        advantage = getattr(config.algorithm, "advantage", None)
        self._uses_greedy = advantage is not None and advantage.uses_greedy
        order = config.taskset.order
        self._sampler = Sampler(tasks.training, order, self._seed)
        self._experts = Sampler(tasks.experts, order, fold(self._seed, EXPERT_STREAM)) if tasks.experts else None
        self._judge: Judge | None = None
        if config.rewards or config.algorithm.uses_rollouts:
            self._judge = build_judge(
                config.rewards, config.judging, tokenizer=policy.tokenizer, device=str(policy.device)
            )
        self._trainer = self._make_trainer(config.trainer.model_copy(update={"precision": precision}))
        self._engine = NativeEngine(
            policy.model,
            policy.tokenizer,
            eos_ids=policy.eos_ids,
            context=policy.context,
            dtype=torch.bfloat16 if precision == "bf16" else torch.float32,
            max_sequences=config.rollout.max_sequences,
            prefill_tokens=config.rollout.prefill_tokens,
        )
        self._sync = InPlace(self._engine)
        self._sync.publish(first_version)
        self._queue = GroupQueue()
        self._pacing = Pacing(config.rollout.batch, config.max_staleness, config.steps * config.rollout.batch)
        self._mark_boundary()
        self._trace = Trace()
        self._counted: dict[str, float] = {}
        self._explorer: Explorer | None = None
        self.evaluator: Evaluator | None = None
        if self._judge is not None:
            self._explorer = Explorer(self._engine, self._judge, policy.tokenizer, self._trace)
            if config.evaluation is not None:
                examiner = Explorer(self._engine, self._judge, policy.tokenizer)
                self.evaluator = Evaluator(examiner, tasks.held_out, config.evaluation, config.rollout, seed)

    def _make_trainer(self, config: TrainerConfig) -> Trainer | ScoreTrainer:
        algorithm, policy, steps = self.config.algorithm, self._policy, self.config.steps
        if isinstance(algorithm, RewardModel):
            return ScoreTrainer(
                policy.model, algorithm, config, total_steps=steps, device=policy.device, seed=self._seed
            )
        weights = None if self._judge is None else self._judge.weights
        limit = self.config.rollout.max_new_tokens
        recipe = build_recipe(algorithm, max_new_tokens=limit, reward_weights=weights)
        teacher, device = _teacher(self.config, policy), policy.device
        return Trainer(policy.model, recipe, config, total_steps=steps, device=device, seed=self._seed, teacher=teacher)

    @property
    def version(self) -> int:
        """Version of the weights now."""
        return self._first_version + self.state.step

    # -- one training step -------------------------------------------------------------------------------------

    async def collect(self) -> list[Experience]:
        """The experiences of the next step. While rewards are awaited, the trainer's inference goes on."""
        if not self._uses_rollouts:
            assert isinstance(self.config.algorithm, DemonstrationOptions)
            return self._demonstrations(self.config.algorithm.batch)
        with self._trace.during("rollout"):
            self._admit()
            await asyncio.sleep(0)  # lets what was admitted reach the engine
            deadline = self.config.rollout.deadline_s
            await _within(self._engine.drain(), deadline, "the master", "the engine to finish its completions")
        experts: list[Experience] = []
        if isinstance(self.config.algorithm, Mixed):
            usual = self.config.rollout.batch * self.config.rollout.group_size
            experts = self._demonstrations(math.ceil(self.config.algorithm.expert_ratio * usual))
        await self._infer(experts)
        with self._trace.during("reward"):
            return await self._queue.get(self.config.rollout.batch, deadline) + experts

    async def _infer(self, experts: list[Experience]) -> None:
        """The trainer's passes over the next batch that need no rewards."""
        batch = None
        for _ in range(_TURNS):  # of the event loop, until the explorer has seen that its completions have ended
            await asyncio.sleep(0)
            batch = batch or self._queue.peek(self.config.rollout.batch)
        if batch is None or not isinstance(self._trainer, Trainer):
            return
        with self._trace.during("inference"):
            for _ in self._trainer.ahead(batch + experts, self.version):
                await asyncio.sleep(0)

    def learn(self, experiences: list[Experience]) -> dict[str, float]:
        """Update the weights and publish them; the trainer's metrics."""
        metrics = self._trainer.step(experiences, self.version)
        self.state.step += 1
        self._sync.publish(self.version)
        self._mark_boundary()
        return metrics

    async def step(self) -> StepResult:
        """collect, then learn."""
        started, tokens = time.perf_counter(), self._engine.tokens_generated
        experiences = await self.collect()
        generated = self._engine.tokens_generated - tokens
        require_rewards(experiences, f"stage {self.config.name}, step {self.state.step + 1}")
        staleness = self.version
        with self._trace.during("train"):
            metrics: dict[str, Any] = batch_metrics(experiences, staleness) | self.learn(experiences)
        total = time.perf_counter() - started  # evaluation and checkpoints come on top
        spans = self._trace.take()
        seconds = {phase: seconds_of(spans, phase) for phase in PHASES if any(span.kind == phase for span in spans)}
        metrics |= judging_metrics(spans) | self._newly_counted()
        return StepResult(metrics, experiences, generated, started, seconds | {"total": total}, spans)

    def _newly_counted(self) -> dict[str, float]:
        """What the judge's rewards have counted since the step before."""
        counted = {} if self._judge is None else self._judge.counters()
        before, self._counted = self._counted, counted
        return {f"judging/{key}": value - before.get(key, 0.0) for key, value in counted.items()}

    def _admit(self) -> None:
        """Start as many rollouts as the pacing rule allows."""
        assert self._explorer is not None
        while self._pacing.may_start(self.state.step):
            number = self._pacing.submitted
            task = self._sampler.next()
            group = f"{self.config.name}-{number:06d}"
            self._queue.put(f"task {task.id}", self._start(task, group, fold(self._seed, number)))
            self._pacing.submitted += 1

    def _start(self, task: Task, group: str, seed: int) -> asyncio.Future[list[Experience]]:
        assert self._explorer is not None
        roll = self._explorer.rollout_with_greedy if self._uses_greedy else self._explorer.rollout
        sampling = self.config.rollout

        def generated(experiences: list[Experience]) -> None:
            self._queue.generated(future, experiences)

        work = roll(task, sampling, n=sampling.group_size, seed=seed, group=group, generated=generated)
        future = asyncio.ensure_future(work)
        return future

    def _demonstrations(self, count: int) -> list[Experience]:
        assert self._experts is not None
        tokenizer = self._policy.tokenizer
        eos_id = self._policy.end_id
        tasks = [self._experts.next() for _ in range(count)]
        if not self.config.algorithm.uses_pairs:
            return [expert_experience(task, tokenizer, eos_id) for task in tasks]
        pairs = [preference_pair(task, tokenizer, eos_id, f"{task.id}/{n}") for n, task in enumerate(tasks)]
        return [experience for pair in pairs for experience in pair]

    # -- checkpoints -------------------------------------------------------------------------------------------

    def _mark_boundary(self) -> None:
        """Remember where the stage is between two steps: what a checkpoint stores even if the next step has begun."""
        self.state.submitted = self._pacing.submitted
        self.state.tasks = self._sampler.state_dict()
        self.state.experts = None if self._experts is None else self._experts.state_dict()
        self._groups_at_boundary = self._queue.futures()

    async def snapshot(self) -> StageState:
        """The stage's state at the last step boundary; waits for rewards of rollouts that have finished."""
        deadline = self.config.rollout.deadline_s
        waiting = asyncio.gather(*self._groups_at_boundary)
        await _within(waiting, deadline, "the checkpoint", f"the rewards of {len(self._groups_at_boundary)} groups")
        groups = [future.result() for future in self._groups_at_boundary]
        self.state.groups = [[encode_experience(experience) for experience in group] for group in groups]
        return self.state

    def trainer_state(self) -> dict[str, Any]:
        """Optimizer, schedule and random state."""
        return self._trainer.state_dict()

    def export(self, folder: Path) -> None:
        """Write into a checkpoint's folder what the stage makes besides the policy."""
        if isinstance(self._trainer, ScoreTrainer):
            policy, scored = self._policy, self._trainer.model
            directory = folder / REWARD_MODEL
            save_classifier(
                policy.model, scored.network, scored.head, policy.tokenizer, directory, end_id=policy.end_id
            )

    def restore(self, state: StageState, trainer: dict[str, Any]) -> None:
        """Go on from a checkpoint; the model's weights are loaded already."""
        self.state = state
        self._pacing.submitted = state.submitted
        assert state.tasks is not None
        self._sampler.load_state_dict(state.tasks)
        if self._experts is not None and state.experts is not None:
            self._experts.load_state_dict(state.experts)
        self._queue.restore([[decode_experience(row) for row in group] for group in state.groups])
        self._trainer.load_state_dict(trainer)
        self._sync.publish(self.version)
        self._mark_boundary()

    async def close(self) -> None:
        """Stop what is running."""
        await self._queue.cancel()
        await self._engine.close()
        if self._judge is not None:
            self._judge.close()


def _teacher(config: StageConfig, policy: Policy) -> Any:
    if not isinstance(config.algorithm, Distill) or config.algorithm.teacher is None:
        return None
    return load_teacher(config.algorithm.teacher, policy)


async def _within(work: Any, seconds: float, waiter: str, owner: str) -> None:
    try:
        async with asyncio.timeout(seconds):
            await work
    except TimeoutError:
        advice = "Raise rollout.deadline_s or lower rollout.max_new_tokens, rollout.batch or rollout.group_size."
        raise DeadlineError(waiter, owner, seconds, advice) from None
