"""What makes experiences: tasks are rolled out, and what the pipeline leaves of their groups is put into the store.

    sampler -> explorer -> queue -> pipeline -> store

Groups pass the pipeline in the order their tasks were submitted, whatever finished first.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rollmill.buffer import ExperienceKind, ExperienceStore
from rollmill.buffer.base import EXPLORER, Group, oldest_version
from rollmill.buffer.kinds import split_by_kind
from rollmill.config.run import StageConfig
from rollmill.data import Sampler
from rollmill.errors import PipelineError
from rollmill.orchestrator.scheduler import RolloutScheduler, accepted
from rollmill.orchestrator.state import StageState
from rollmill.pipelines import Pipeline, PipelineContext
from rollmill.rollout.runner import REJECTION_REASON_KEY
from rollmill.trackers.trace import Trace
from rollmill.types import Experience, Task, first_per_rollout


@dataclass(frozen=True, slots=True)
class PipelineInputs:
    """What the pipeline's operators may know of the model and the tasks."""

    tokenizer: Any
    fingerprint: str  #: of the tokenizer
    end_id: int
    task: Callable[[str], Task]


@dataclass(frozen=True, slots=True)
class RolloutComponents:
    """What groups pass through, from the sampler to the store."""

    sampler: Sampler
    rollouts: RolloutScheduler
    pipeline: Pipeline
    store: ExperienceStore
    facts: PipelineInputs
    trace: Trace


class RolloutProducer:
    """The rollouts of one stage, from tasks to verified groups in the store."""

    writer = EXPLORER  #: of the groups that are put into the store

    def __init__(self, config: StageConfig, line: RolloutComponents) -> None:
        self._config, self._facts, self._trace = config, line.facts, line.trace
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
        groups = split_by_kind(left, experiences[0].group, self._facts.fingerprint)
        for group in groups:
            group.writer = self.writer if group.shelf is ExperienceKind.ROLLOUT else group.writer
        self._put(groups)
        return any(group.shelf is ExperienceKind.ROLLOUT for group in groups)

    def _put(self, groups: Sequence[Group]) -> None:
        self._store.put(groups)

    def _context(self, version: int) -> PipelineContext:
        facts = self._facts
        return PipelineContext(
            step=version + 1,
            version=version,
            tokenizer=facts.tokenizer,
            end_id=facts.end_id,
            max_new_tokens=self._config.rollout.max_new_tokens,
            deadline_s=self._config.rollout.deadline_s,
            task=facts.task,
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
