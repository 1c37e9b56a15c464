"""Batches of a stage: groups are rolled out, judged and verified, and wait in the buffer until a step takes them.

    sampler -> scheduler (rollouts, rewards) -> pipeline -> buffer -> batch

Groups pass the pipeline in the order their tasks were submitted, whatever finished first. For every group of which the
pipeline leaves nothing another task is rolled out, so a batch is never short.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from rollmill.buffer import ExperienceKind, ExperienceStore
from rollmill.buffer.base import EXPLORER, Group, oldest_version, split_by_kind
from rollmill.buffer.experts import RatingOverrides
from rollmill.config.run import StageConfig
from rollmill.data import Sampler
from rollmill.errors import PipelineError
from rollmill.orchestrator.batch_reader import BatchReader
from rollmill.orchestrator.scheduler import RolloutScheduler, accepted
from rollmill.orchestrator.state import StageState
from rollmill.pipelines import Pipeline, PipelineContext
from rollmill.rollout.runner import REJECTION_REASON_KEY
from rollmill.trackers.trace import Trace
from rollmill.types import Experience, Task, first_per_rollout


class BatchSource(Protocol):
    """Where a stage's experiences come from."""

    async def roll_out(self, version: int, deadlines: int = 1) -> None:
        """Start what the pacing rule admits while weights are at `version`, and wait for its tokens.

        Args:
            deadlines: how many times rollout.deadline_s they may take.
        """

    def replay(self, version: int) -> list[Experience]:
        """See BatchReader."""

    def known(self) -> list[Experience] | None:
        """What `collect` will give, judged or not; None where some tokens, or the pipeline's verdict, are missing."""

    async def collect(self, version: int) -> list[Experience]:
        """The verified experiences of one batch of groups, once they are judged.

        Raises:
            PipelineError: operators leave nothing of too many groups; names those that dropped most.
            DeadlineError: they do not come.
        """
        ...

    def upcoming(self) -> list[list[Experience]]:
        """Completions of later steps whose tokens are there, judged or not, batch by batch."""
        ...

    def learned(self, version: int) -> None:
        """See BatchReader."""

    def metrics(self) -> dict[str, float]:
        """What was done since the last call."""
        ...

    def mark(self, state: StageState) -> None:
        """Note a step boundary in the stage's state."""

    async def snapshot(self, state: StageState) -> None:
        """Put the groups of the last boundary into the state; waits for rewards of rollouts that have finished."""

    def restore(self, state: StageState) -> None:
        """Go on from a checkpoint."""

    async def close(self) -> None:
        """Stop what is under way."""


@dataclass(frozen=True, slots=True)
class RolloutComponents:
    """The components that groups pass through, from the sampler to the buffer."""

    sampler: Sampler
    rollouts: RolloutScheduler
    pipeline: Pipeline
    store: ExperienceStore
    trace: Trace
    tokenizer: Any
    fingerprint: str  #: of the tokenizer
    end_id: int
    task: Callable[[str], Task]  #: by id


class RolloutProducer:
    """The rollouts of one stage, from tasks to verified groups in the store."""

    writer = EXPLORER  #: of the groups that are put into the store

    def __init__(self, config: StageConfig, line: RolloutComponents) -> None:
        self._config, self._components, self._trace = config, line, line.trace
        self._sampler = line.sampler
        self._pipeline, self._store = line.pipeline, line.store
        self._rollouts, self._queue = line.rollouts, line.rollouts.queue
        self._observed = any(section.name == "success_rate" for section in config.pipeline)
        self._raw: list[list[float]] = []  # rewards by group, since the last step
        self._rejected: list[list[str]] = []  # why rollouts were, by group of which nothing was left
        self._late = 0

    async def _verify_oldest(self, count: int, version: int) -> int:
        """Verify the oldest `count` groups, once they are judged; of how many nothing is left to learn from."""
        wasted = 0
        for experiences in await self._queue.get(count, self._config.rollout.deadline_s):
            wasted += not await self._admit(experiences, version)
        return wasted

    def _require_some(self, wasted: int) -> None:
        """Raises PipelineError where too many groups of one step came to nothing; names what dropped most."""
        if wasted > self._config.rollout.refills * self._config.rollout.batch:
            raise PipelineError(self._nothing_left(wasted))

    async def _admit(self, group: Sequence[Experience], version: int) -> bool:
        """Verify a group; whether anything is left of it. One that is too stale was not wasted: it is not counted."""
        experiences = accepted(group)
        if not experiences:
            self._rejected.append([each.info[REJECTION_REASON_KEY] for each in group])
            return False
        self._observe(experiences)
        if self._is_late(experiences, version):
            self._late += 1
            return True
        return await self._verify(experiences, version)

    def _observe(self, experiences: Sequence[Experience]) -> None:
        """Take note of the rewards of a group's rollouts."""
        rewards = [each.reward for each in first_per_rollout(experiences) if each.reward is not None]
        self._raw.append(rewards)
        if rewards and not self._observed:
            self._sampler.observe(experiences[0].task_id, [min(max(reward, 0.0), 1.0) for reward in rewards])

    def _is_late(self, experiences: Sequence[Experience], version: int) -> bool:
        """Whether a group is staler than the stage allows: others were put into the buffer before it meanwhile."""
        return 0 <= oldest_version(experiences) < version - self._config.max_staleness

    async def _verify(self, experiences: Sequence[Experience], version: int) -> bool:
        """One group through the pipeline into the store; whether anything of it is left to learn from."""
        own = [_copied(each) for each in experiences] if len(self._pipeline) else experiences
        left = await self._pipeline.process(own, self._context(version))
        groups = split_by_kind(left, experiences[0].group, self._components.fingerprint)
        for group in groups:
            group.writer = self.writer if group.shelf is ExperienceKind.ROLLOUT else group.writer
        self._put(groups)
        return any(group.shelf is ExperienceKind.ROLLOUT for group in groups)

    def _put(self, groups: Sequence[Group]) -> None:
        self._store.put(groups)

    def _context(self, version: int) -> PipelineContext:
        parts = self._components
        return PipelineContext(
            step=version + 1,
            version=version,
            tokenizer=parts.tokenizer,
            end_id=parts.end_id,
            max_new_tokens=self._config.rollout.max_new_tokens,
            deadline_s=self._config.rollout.deadline_s,
            task=parts.task,
            observe=self._sampler.observe,
        )

    def _nothing_left(self, wasted: int) -> str:
        said = []
        if self._rejected:
            reasons = Counter(reason for group in self._rejected for reason in group or ["the policy was never asked"])
            why = ", ".join(f"{count} {reason}" for reason, count in reasons.items())
            said.append(f"workflow `{self._config.workflow.name}` rejected all of {len(self._rejected)} groups ({why})")
        for name, report in self._pipeline.reports().items():
            if report.dropped:
                why = ", ".join(f"{count} {reason}" for reason, count in report.reasons.items())
                said.append(f"`{name}` dropped {report.dropped} completions ({why})")
        return (
            f"stage {self._config.name}: nothing was left of {wasted} groups in one step: {'; '.join(said)}. Loosen "
            f"these, give other tasks, or raise rollout.refills ({self._config.rollout.refills})"
        )

    def metrics(self) -> dict[str, float]:
        """What rollouts and pipeline did since the last call, and what the sampler knows."""
        found = dict(self._sampler.metrics()) | self._rollouts.metrics()
        if self._rejected:
            found["rollout/empty_groups"] = float(len(self._rejected))
        if len(self._pipeline) or self._late:
            rewards = [reward for group in self._raw for reward in group]
            found |= {"raw/groups": float(len(self._raw)), "raw/late": float(self._late)}
            found |= {"raw/reward": float(np.mean(rewards))} if rewards else {}
            for name, report in self._pipeline.take_reports().items():
                found |= {f"pipeline/{name}/{key}": float(value) for key, value in report.numbers().items()}
        self._raw, self._late, self._rejected = [], 0, []
        return found

    # -- checkpoints -------------------------------------------------------------------------------------------

    def mark(self, state: StageState) -> None:
        """Note a step boundary in the stage's state."""
        self._rollouts.mark(state)
        state.pipeline = self._pipeline.state_dict()

    async def snapshot(self, state: StageState) -> None:
        """Put the groups of the last boundary into the state; waits for rewards of rollouts that have finished."""
        await self._rollouts.snapshot(state)

    def restore(self, state: StageState) -> None:
        """Go on from a checkpoint."""
        self._rollouts.restore(state)
        self._pipeline.load_state_dict(state.pipeline)

    async def close(self) -> None:
        """Stop what is under way."""
        await self._rollouts.close()
        self._pipeline.close()


def _copied(experience: Experience) -> Experience:
    """A copy for operators to change: a checkpoint made while a step is under way holds what the explorer made."""
    arrays = {name: getattr(experience, name).copy() for name in ("token_ids", "action_mask", "logprobs", "versions")}
    parts, info = dict(experience.reward_parts), copy.deepcopy(experience.info)
    return replace(experience, **arrays, reward_parts=parts, info=info)


class RolloutBatches(RolloutProducer):
    """The rollouts of one stage, from tasks to batches; see Supplies.

    Args:
        first_version: of the weights when the stage began.
        seed: what replay derives from.
    """

    def __init__(
        self, config: StageConfig, line: RolloutComponents, ratings: RatingOverrides, *, first_version: int, seed: int
    ) -> None:
        super().__init__(config, line)
        self._first_version = first_version
        self._reader = BatchReader(config, line.store, ratings, first_version=first_version, seed=seed)

    async def roll_out(self, version: int, deadlines: int = 1) -> None:
        """See BatchSource."""
        await self._rollouts.run(version, self._waiting(version), deadlines)

    def replay(self, version: int) -> list[Experience]:
        """See BatchReader."""
        return self._reader.replay(version)

    def known(self) -> list[Experience] | None:
        """See BatchSource."""
        if len(self._pipeline) or self._store.waiting():
            return None
        groups = self._queue.peek(self._config.rollout.batch)
        if groups is None or len(groups) < self._config.rollout.batch:
            return None
        left = [accepted(group) for group in groups]
        return [each for group in left for each in group] if all(left) else None

    async def collect(self, version: int) -> list[Experience]:
        """See BatchSource."""
        wasted = 0
        while (missing := self._config.rollout.batch - self._waiting(version)) > 0:
            if not self._rollouts.ready(missing):
                with self._trace.record_span("rollout", f"completions of {missing} groups"):
                    await self.roll_out(version)
            with self._trace.record_span("reward", f"rewards of {missing} groups"):
                wasted += await self._verify_oldest(missing, version)
            self._require_some(wasted)
        experiences = self._reader.take(version, self._oldest(version))
        self._rollouts.end_step()
        return experiences

    def upcoming(self) -> list[list[Experience]]:
        """See BatchSource; what the pipeline may still drop included."""
        groups = [accepted(group.known) for group in self._queue.all() if group.known]
        size = self._config.rollout.batch
        return [[each for group in groups[i : i + size] for each in group] for i in range(0, len(groups), size)]

    def _waiting(self, version: int) -> int:
        return self._store.waiting(min_version=self._oldest(version))

    def _oldest(self, version: int) -> int | None:
        age = self._config.buffer.max_age
        return None if age is None else version - age

    def learned(self, version: int) -> None:
        """See BatchReader."""
        self._reader.learned(version)

    def metrics(self) -> dict[str, float]:
        """What rollouts and pipeline did since the last call, what the sampler knows, and what joined again."""
        return super().metrics() | self._reader.metrics()
