"""Batches of a stage: groups are rolled out, rewarded and verified, then wait in the buffer until a step takes them.

    sampler -> scheduler (rollouts, rewards) -> pipeline -> buffer -> batch

Groups pass the pipeline in the order their tasks were submitted, whichever finished first. For every group that the
pipeline drops entirely, another task is rolled out, so a batch is never short.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rollmill.buffer import ExperienceKind, ExperienceStore, Group
from rollmill.buffer.base import EXPLORER, oldest_version, split_by_kind
from rollmill.buffer.offline_data import RatingOverrides
from rollmill.buffer.replay import mean_abs_advantage
from rollmill.config.run import StageConfig
from rollmill.data import Sampler
from rollmill.errors import PipelineError
from rollmill.orchestrator.metrics import REPLAYED
from rollmill.orchestrator.scheduler import RolloutScheduler, accepted
from rollmill.orchestrator.state import StageState
from rollmill.pipelines import Pipeline, PipelineContext
from rollmill.pipelines.batch import copy_experience
from rollmill.seeds import derive_seed
from rollmill.trackers.trace import Trace
from rollmill.types import Experience, Task, first_per_rollout, most_varied_rewards

REPLAY_STREAM = 0x4E


@dataclass(frozen=True, slots=True)
class RolloutComponents:
    """The components that groups pass through, from the sampler to the buffer."""

    sampler: Sampler
    scheduler: RolloutScheduler
    pipeline: Pipeline
    store: ExperienceStore
    trace: Trace
    tokenizer: Any
    fingerprint: str  #: of the tokenizer
    end_id: int
    task: Callable[[str], Task]  #: by id


class RolloutBatches:
    """The rollouts of one stage, from tasks to batches: fresh groups, and replayed ones.

    Args:
        first_version: version of the weights at the start of the stage.
        seed: the seed of replay.
        shared: other processes put groups into the store at any time, of any version: `max_staleness` bounds them, too.
    """

    writer = EXPLORER  #: writer of the groups stored

    def __init__(
        self,
        config: StageConfig,
        components: RolloutComponents,
        ratings: RatingOverrides,
        *,
        first_version: int,
        seed: int,
        shared: bool = False,
    ) -> None:
        self._config, self._components, self._trace = config, components, components.trace
        self._sampler = components.sampler
        self._pipeline, self._store = components.pipeline, components.store
        self._scheduler, self._queue = components.scheduler, components.scheduler.queue
        self._first_version, self._shared = first_version, shared
        self._ratings, self._seed = ratings, seed
        self._taken: list[Group] = []  # for the step under way
        self._replayed: Counter[str] = Counter()  # groups by domain, "" without domains
        self._views = config.by_domain()
        self._raw: list[list[float]] = []  # rewards by group, since the last step
        self._rejected: list[list[str]] = []  # reasons by fully rejected group
        self._late = 0

    async def roll_out(self, version: int, deadlines: int = 1) -> None:
        """Start the rollouts that the scheduler admits at weights `version`, and wait for their completions.

        Args:
            deadlines: how many times rollout.deadline_s they may take.
        """
        await self._scheduler.run(version, lambda: self._waiting(version), deadlines)

    def replay(self, version: int) -> list[Experience]:
        """Return replayed experiences for the step after `version`, with the rewards people have given them since; none
        without `buffer.replay`."""
        rule = self._config.buffer.replay
        self._taken = []
        if rule is None:
            return []
        domains = self._config.domains.items()
        groups = self._store.replay(
            rule,
            step=version + 1,
            version=version,
            seed=derive_seed(self._seed, REPLAY_STREAM),
            since=self._first_version,  # earlier stages may have had other rewards
            shares={name: each.replay_share for name, each in domains if each.replay_share is not None},
        )
        for group in groups:
            marked = [_marked(each) for each in self._ratings.apply_ratings(group.experiences)]
            self._taken.append(replace(group, experiences=marked))
        self._replayed = Counter(self._config.domain_of(group.experiences[0].task_id) for group in self._taken)
        return [experience for group in self._taken for experience in group.experiences]

    def peek(self) -> list[Experience] | None:
        """Return the experiences that `take` will return, perhaps without rewards; None while completions are
        missing, or others may take their place: there is a pipeline, or groups wait in the buffer."""
        if len(self._pipeline) or self._store.waiting():
            return None
        groups = self._queue.peek(self._config.rollout.batch)
        if groups is None or len(groups) < self._config.rollout.batch:
            return None
        left = [accepted(group) for group in groups]
        return [each for group in left for each in group] if all(left) else None

    async def take(self, version: int) -> list[Experience]:
        """Return the verified experiences of one batch of groups, once they have rewards.

        Raises:
            PipelineError: the pipeline drops too many groups entirely; names the operators that dropped most.
            DeadlineError: they take too long.
        """
        before = self._store.expired() if self._shared else 0
        await self._fill(version)
        rollout = self._config.rollout
        fresh = self._store.take(
            rollout.batch, step=version + 1, deadline_s=rollout.deadline_s, min_version=self._oldest(version)
        )
        self._taken += fresh
        if self._shared:
            self._late += self._store.expired() - before
        self._scheduler.end_step()
        return [experience for group in fresh for experience in group.experiences]

    async def _fill(self, version: int) -> None:
        """Roll out and verify until a batch of groups waits."""
        wasted = 0
        while (missing := self._config.rollout.batch - self._waiting(version)) > 0:
            if not self._scheduler.ready(missing):
                with self._trace.enter_phase("rollout", f"completions of {missing} groups"):
                    await self.roll_out(version)
            with self._trace.enter_phase("reward", f"rewards of {missing} groups"):
                wasted += await self._process_oldest(missing, version)
            if wasted > self._config.rollout.refills * self._config.rollout.batch:
                raise PipelineError(self._nothing_left(wasted))

    def upcoming(self) -> list[list[Experience]]:
        """Return finished completions of later steps, with or without rewards, batch by batch; the pipeline may still
        drop some."""
        groups = [accepted(group.experiences) for group in self._queue.all() if group.experiences]
        size = self._config.rollout.batch
        return [[each for group in groups[i : i + size] for each in group] for i in range(0, len(groups), size)]

    def _waiting(self, version: int) -> int:
        return self._store.waiting(min_version=self._oldest(version))

    def _oldest(self, version: int) -> int | None:
        """The oldest version whose tokens may be trained on at `version`; None: any."""
        staleness, age = self._config.max_staleness, self._config.buffer.max_age
        if self._shared:
            return version - (staleness if age is None else min(age, staleness))
        return None if age is None else version - age

    def mark_trained(self, version: int) -> None:
        """Report that the batch has been trained on, in the step that made `version`."""
        rule = self._config.buffer.replay
        if rule is not None and rule.priority == "advantage":
            for group in self._taken:
                group.priority = mean_abs_advantage(group)
            self._store.update_priorities(self._taken, step=version)
        self._taken = []

    async def _process_oldest(self, count: int, version: int) -> int:
        """Verify the oldest `count` groups, once they have rewards; return how many were dropped entirely."""
        wasted = 0
        for experiences in await self._queue.get(count, self._config.rollout.deadline_s):
            wasted += not await self._accept_group(experiences, version)
        return wasted

    async def _accept_group(self, group: Sequence[Experience], version: int) -> bool:
        """Verify a group; return whether any of it is left. A group that is too stale counts as left, not as wasted."""
        experiences = accepted(group)
        if not experiences:
            self._rejected.append([each.rejected for each in group if each.rejected is not None])
            return False
        self._observe(experiences)
        if self._is_late(experiences, version):
            self._late += 1
            return True
        return await self._process_group(experiences, version)

    def _observe(self, experiences: Sequence[Experience]) -> None:
        """Record the rewards of a group's rollouts; the sampler gets those of one role."""
        self._raw.append([each.reward for each in first_per_rollout(experiences) if each.reward is not None])
        rewards = most_varied_rewards(experiences)
        self._sampler.observe_rewards(experiences[0].task_id, rewards)
        rates = any(section.name == "success_rate" for section in self._view(experiences[0].task_id).pipeline)
        if rewards and not rates:  # else that operator tells the sampler
            self._sampler.observe(experiences[0].task_id, [min(max(reward, 0.0), 1.0) for reward in rewards])

    def _is_late(self, experiences: Sequence[Experience], version: int) -> bool:
        """True if a group is staler than the stage allows, because others entered the buffer before it."""
        return 0 <= oldest_version(experiences) < version - self._config.max_staleness

    async def _process_group(self, experiences: Sequence[Experience], version: int) -> bool:
        """Pass one group through the pipeline into the store; return whether anything is left to train on."""
        copies = [copy_experience(each) for each in experiences] if len(self._pipeline) else experiences
        left = await self._pipeline.process(copies, self._context(version, experiences[0].task_id))
        groups = split_by_kind(left, experiences[0].group, self._components.fingerprint)
        for group in groups:
            group.writer = self.writer if group.kind is ExperienceKind.ROLLOUT else group.writer
        self._put(groups)
        return any(group.kind is ExperienceKind.ROLLOUT for group in groups)

    def _put(self, groups: list[Group]) -> None:
        self._store.put(groups)

    def _view(self, task_id: str) -> StageConfig:
        """The stage as the task's domain sees it."""
        return self._views[self._config.domain_of(task_id)]

    def _context(self, version: int, task_id: str) -> PipelineContext:
        parts = self._components
        return PipelineContext(
            step=version + 1,
            version=version,
            tokenizer=parts.tokenizer,
            end_id=parts.end_id,
            max_new_tokens=self._view(task_id).rollout.max_new_tokens,
            deadline_s=self._config.rollout.deadline_s,
            task=parts.task,
            observe=self._sampler.observe,
        )

    def _nothing_left(self, wasted: int) -> str:
        causes = []
        if self._rejected:
            reasons = Counter(reason for group in self._rejected for reason in group or ["the policy was never asked"])
            why = ", ".join(f"{count} {reason}" for reason, count in reasons.items())
            causes.append(
                f"workflow `{self._config.workflow.name}` rejected all of {len(self._rejected)} groups ({why})"
            )
        causes += filter(None, [self._pipeline.describe_dropped()])
        return (
            f"stage {self._config.name}: nothing was left of {wasted} groups in one step: {'; '.join(causes)}. Loosen "
            f"these, give other tasks, or raise rollout.refills ({self._config.rollout.refills})"
        )

    def metrics(self) -> dict[str, float]:
        """Metrics of rollouts since the last call, of the sampler, and of replay in the last step."""
        found = dict(self._sampler.metrics()) | self._scheduler.metrics()
        if self._rejected:
            found["rollout/empty_groups"] = float(len(self._rejected))
        if len(self._pipeline) or self._late:
            rewards = [reward for group in self._raw for reward in group]
            found |= {"raw/groups": float(len(self._raw)), "raw/late": float(self._late)}
            found |= {"raw/reward": float(np.mean(rewards))} if rewards else {}
        self._raw, self._late, self._rejected = [], 0, []
        if self._config.buffer.replay is not None:
            found |= {"replay/groups": float(self._replayed.total())}
            found |= {f"domain/{name}/replayed": float(self._replayed[name]) for name in self._config.domains}
        return found

    # -- checkpoints -------------------------------------------------------------------------------------------

    def mark(self, state: StageState) -> None:
        """Record a step boundary in the stage's state."""
        self._scheduler.mark(state)

    async def snapshot(self, state: StageState) -> None:
        """Store the groups of the last boundary in the state; waits for rewards of finished rollouts."""
        await self._scheduler.snapshot(state)

    def restore(self, state: StageState) -> None:
        """Resume from a checkpoint."""
        self._scheduler.restore(state)

    async def close(self) -> None:
        """Stop all running work."""
        await self._scheduler.close()


def _marked(experience: Experience) -> Experience:
    """Return a copy marked as replayed."""
    return replace(experience, info={**experience.info, REPLAYED: True}, advantage=None)
