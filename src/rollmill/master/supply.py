"""What a training step learns from: rollouts that are verified and kept until a batch is there, and older ones again.

    sampler -> explorer -> queue -> pipeline -> store -> batch

Groups pass the pipeline in the order their tasks were submitted, whatever finished first. For every group of which the
pipeline leaves nothing, another task is rolled out, so a batch is never short.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from rollmill.buffer import Group, Shelf, Store
from rollmill.buffer.base import EXPLORER, oldest_version
from rollmill.buffer.grouping import grouped
from rollmill.buffer.ratings import Ratings
from rollmill.buffer.replay import mean_advantage
from rollmill.config.run import StageConfig
from rollmill.core.errors import PipelineError
from rollmill.core.types import Experience, Task, one_per_rollout
from rollmill.engines.native.rng import fold
from rollmill.explorer.runner import REJECTED
from rollmill.master.measures import REPLAYED
from rollmill.master.rollouts import Rollouts, accepted
from rollmill.master.state import StageState
from rollmill.monitor.trace import Trace
from rollmill.pipelines import Context, Pipeline
from rollmill.tasks import Sampler

Result = TypeVar("Result")

REPLAY_STREAM = 0x4E


@dataclass(frozen=True, slots=True)
class Facts:
    """What the pipeline's operators may know of the model and the tasks."""

    tokenizer: Any
    fingerprint: str  #: of the tokenizer
    end_id: int
    task: Callable[[str], Task]


class Supply:
    """The rollouts of one stage, from tasks to batches.

    Args:
        first_version: of the weights when the stage began.
        seed: what replay derives from.
    """

    writer = EXPLORER  #: of the groups that are put into the store

    def __init__(
        self,
        config: StageConfig,
        *,
        sampler: Sampler,
        rollouts: Rollouts,
        pipeline: Pipeline,
        store: Store,
        ratings: Ratings,
        facts: Facts,
        trace: Trace,
        first_version: int,
        seed: int,
    ) -> None:
        self._config, self._facts, self._trace = config, facts, trace
        self._first_version, self._seed = first_version, seed
        self._sampler = sampler
        self._pipeline, self._store, self._ratings = pipeline, store, ratings
        self._rollouts, self._queue = rollouts, rollouts.queue
        self._observed = any(section.name == "success_rate" for section in config.pipeline)
        self._raw: list[list[float]] = []  # rewards by group, since the last step
        self._rejected: list[list[str]] = []  # why rollouts were, by group of which nothing was left
        self._late, self._replayed = 0, 0
        self._taken: list[Group] = []

    async def roll_out(self, version: int, deadlines: int = 1) -> None:
        """Start what the pacing rule admits while weights are at `version`, and wait for its tokens.

        Args:
            deadlines: how many times rollout.deadline_s they may take.
        """
        await self._rollouts.run(version, self._waiting(version), deadlines)

    def again(self, version: int) -> list[Experience]:
        """Experiences that the stage has learned from before, and that join the step after `version`; with the rewards
        people have given them since.
        """
        rule = self._config.buffer.replay
        self._taken = []
        if rule is None:
            return []
        seed = fold(self._seed, REPLAY_STREAM)
        since = self._first_version  # earlier stages may have had other rewards
        for group in self._store.replay(rule, step=version + 1, version=version, seed=seed, since=since):
            marked = [_marked(each) for each in self._ratings.applied(group.experiences)]
            self._taken.append(replace(group, experiences=marked))
        self._replayed = len(self._taken)
        return [experience for group in self._taken for experience in group.experiences]

    def known(self) -> list[Experience] | None:
        """What `collect` will give, judged or not; None where some tokens, or the pipeline's verdict, are missing."""
        if len(self._pipeline) or self._store.waiting():
            return None
        groups = self._queue.peek(self._config.rollout.batch)
        if groups is None or len(groups) < self._config.rollout.batch:
            return None
        left = [accepted(group) for group in groups]
        return [each for group in left for each in group] if all(left) else None

    async def collect(self, version: int) -> list[Experience]:
        """The verified experiences of one batch of groups, once they are judged.

        Raises:
            PipelineError: operators leave nothing of too many groups; names those that dropped most.
        """
        rollout, wasted = self._config.rollout, 0
        while (missing := rollout.batch - self._waiting(version)) > 0:
            if not self._rollouts.ready(missing):
                with self._trace.during("rollout", f"completions of {missing} groups"):
                    await self.roll_out(version)
            with self._trace.during("reward", f"rewards of {missing} groups"):
                for experiences in await self._queue.get(missing, rollout.deadline_s):
                    wasted += not await self._admit(experiences, version)
            if wasted > rollout.refills * rollout.batch:
                raise PipelineError(self._nothing_left(wasted))
        fresh = self._store.take(
            rollout.batch, step=version + 1, deadline_s=rollout.deadline_s, min_version=self._oldest(version)
        )
        self._rollouts.end_step()
        self._taken += fresh
        return [experience for group in fresh for experience in group.experiences]

    async def _admit(self, group: Sequence[Experience], version: int) -> bool:
        """Verify a group; whether anything is left of it. One that is too stale was not wasted: it is not counted."""
        experiences = accepted(group)
        if not experiences:
            self._rejected.append([each.info[REJECTED] for each in group])
            return False
        self._observe(experiences)
        if self._is_late(experiences, version):
            self._late += 1
            return True
        return await self._verify(experiences, version)

    def _waiting(self, version: int) -> int:
        return self._store.waiting(min_version=self._oldest(version))

    def _observe(self, experiences: Sequence[Experience]) -> None:
        """Take note of the rewards of a group's rollouts."""
        rewards = [each.reward for each in one_per_rollout(experiences) if each.reward is not None]
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
        groups = grouped(left, experiences[0].group, self._facts.fingerprint)
        for group in groups:
            group.writer = self.writer if group.shelf is Shelf.USUAL else group.writer
        self._store.put(groups)
        return any(group.shelf is Shelf.USUAL for group in groups)

    def _context(self, version: int) -> Context:
        facts = self._facts
        return Context(
            step=version + 1,
            version=version,
            tokenizer=facts.tokenizer,
            end_id=facts.end_id,
            max_new_tokens=self._config.rollout.max_new_tokens,
            deadline_s=self._config.rollout.deadline_s,
            task=facts.task,
            observe=self._sampler.observe,
        )

    def _oldest(self, version: int) -> int | None:
        age = self._config.buffer.max_age
        return None if age is None else version - age

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

    def learned(self, version: int) -> None:
        """The trainer has learned from what was handed out for the step that made `version`."""
        rule = self._config.buffer.replay
        if rule is not None and rule.priority == "advantage":
            for group in self._taken:
                group.priority = mean_advantage(group)
            self._store.learned(self._taken, step=version)
        self._taken = []

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
        if self._config.buffer.replay is not None:
            found["replay/groups"] = self._replayed
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


def _marked(experience: Experience) -> Experience:
    """A copy that can be told from fresh ones."""
    return replace(experience, info={**experience.info, REPLAYED: True}, advantage=None)
