"""Runs a workflow for every rollout of a group, and turns what was recorded into judged experiences."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from rollmill.config.rollout import SamplingConfig
from rollmill.engines.base import RolloutEngine
from rollmill.rewards import RewardManager, RewardResult
from rollmill.rewards.event_loop import gather_or_cancel
from rollmill.rollout.chat import ChatRenderer
from rollmill.rollout.policy import Policy
from rollmill.rollout.recorder import REPETITION_KEY, Recorder
from rollmill.rollout.retries import RetryingWorkflow
from rollmill.rollout.workflow import Rollout, RolloutResult
from rollmill.seeds import derive_seed
from rollmill.trackers.trace import REWARD, Trace
from rollmill.types import Experience, Task

REPETITION_PENALTY = "rollout/repetition"  #: part of the reward: what repetition costs
REJECTION_REASON_KEY = "rejected"
"""Key of `info` of the experiences of a rollout that nothing is to be learned from: why."""
RETRY_STREAM = 0x7E7  # keeps the randomness of a rollout's tries apart


class WorkflowRunner:
    """Rolls out groups by a workflow. `trace` is told of every completion and judgement.

    Args:
        judge: what finishes the judgements of a group; the workflow's own rewards need none.
    """

    def __init__(
        self,
        attempts: RetryingWorkflow,
        engine: RolloutEngine,
        chat: ChatRenderer,
        judge: RewardManager,
        trace: Trace | None = None,
    ) -> None:
        self._attempts, self._engine, self._chat = attempts, engine, chat
        self._judge, self._trace = judge, trace

    async def group(self, task: Task, sampling: SamplingConfig, *, n: int, seed: int, group: str) -> list[Experience]:
        """The judged experiences of n rollouts, ordered by rollout; those of rejected ones say why in `info`.

        Raises:
            WorkflowError: the workflow failed, or returned something that is not a reward.
            RollmillError: an engine or a reward failed.
        """

        def begin(index: int, number: int) -> Rollout:
            again = (RETRY_STREAM, number) if number else ()
            return self._rollout(task, sampling, index, seed, derive_seed(seed, index, *again), group)

        ended = await gather_or_cancel(self._attempts.run(partial(begin, index)) for index in range(n))
        outcomes = await self._finished(task, [outcome for _, outcome in ended])
        rollouts = [rollout for rollout, _ in ended]
        return [
            one for rollout, outcome in zip(rollouts, outcomes, strict=True) for one in self._made(rollout, outcome)
        ]

    def take_counts(self) -> dict[str, float]:
        """What has become of rollouts since the last call: see Attempts."""
        return self._attempts.take_counts()

    def _rollout(
        self, task: Task, sampling: SamplingConfig, index: int, group_seed: int, seed: int, group: str
    ) -> Rollout:
        recorder, id = Recorder(), f"{group}/{index}"
        policy = Policy(
            self._engine,
            self._chat,
            sampling,
            seed=seed,
            name=f"task {task.id}",
            recorder=recorder,
            trace=self._trace,
            index=index,
        )
        return Rollout(id, task, group, index, seed, group_seed, sampling, policy, recorder)

    async def _finished(self, task: Task, outcomes: list[RolloutResult]) -> list[RolloutResult]:
        """Judgements with what the rewards of whole groups say."""
        if not self._judge.groupwise:
            return outcomes
        judged = [(i, each.completion, each.judgement) for i, each in enumerate(outcomes) if each.judgement is not None]
        completions = [completion for _, completion, _ in judged if completion is not None]
        found = await self._judge.add_group_rewards(task, completions, [judgement for _, _, judgement in judged])
        outcomes = list(outcomes)
        for (index, _, _), judgement in zip(judged, found, strict=True):
            outcomes[index] = outcomes[index].judged(judgement)
        return outcomes

    def _made(self, rollout: Rollout, outcome: RolloutResult) -> list[Experience]:
        experiences = rollout.recorder.experiences(
            id=rollout.id, task_id=rollout.task.id, group=rollout.group, decode=self._chat.decode
        )
        if experiences and rollout.recorder.numbers:
            experiences[0].info["numbers"] = dict(rollout.recorder.numbers)
        if outcome.rejected is not None:
            for experience in experiences:
                experience.reward, experience.reward_parts = None, {}
                experience.info[REJECTION_REASON_KEY] = outcome.rejected
            return experiences
        alone = [each for each in experiences if each.reward is not None]  # the workflow has said what they are worth
        shared = [each for each in experiences if each.reward is None]
        for experience in alone:
            assert experience.reward is not None
            experience.reward_parts = {self._attempts.name: experience.reward}
            experience.info["step_reward"] = experience.reward
        if outcome.judgement is not None:
            trace_reward_result(self._trace, outcome.judgement)
            for experience in shared:
                assign_reward(experience, outcome.judgement)
        _reward(shared, rollout.recorder, outcome, forked=len(experiences) > 1)
        for branches in (shared, *([each] for each in alone)):
            apply_repetition_penalty(branches, rollout.sampling, any(REPETITION_KEY in each.info for each in branches))
        return experiences


def _reward(experiences: Sequence[Experience], recorder: Recorder, outcome: RolloutResult, *, forked: bool) -> None:
    """Give all experiences the rollout's reward. What it earned at its end belongs to its last step."""
    steps = [each.reward for each in recorder.steps if each.reward is not None]
    reward = outcome.reward if not steps else sum(steps) + (outcome.reward or 0.0)
    for experience in experiences:
        experience.reward = reward
        experience.reward_parts = {**outcome.parts, "steps": sum(steps)} if steps else dict(outcome.parts)
        if reward is None:
            experience.info.pop("step_reward", None)
        elif forked:
            experience.info.setdefault("step_reward", 0.0)
    if experiences and "step_reward" in experiences[-1].info:
        experiences[-1].info["step_reward"] += outcome.reward or 0.0


def apply_repetition_penalty(experiences: Sequence[Experience], sampling: SamplingConfig, repeated: bool) -> None:
    """Take `repetition.penalty` off a rollout's reward if a completion of it ended by repetition.

    Every judged rollout has the part, 0 or not: advantages that see parts compare it. One without a reward stays so.
    """
    if sampling.repetition is None or not sampling.repetition.penalty:
        return
    value = -sampling.repetition.penalty if repeated else 0.0
    for experience in experiences:
        if experience.reward is not None:
            experience.reward += value
            experience.reward_parts[REPETITION_PENALTY] = value
    if experiences and "step_reward" in experiences[-1].info:
        experiences[-1].info["step_reward"] += value


def trace_reward_result(trace: Trace | None, judgement: RewardResult) -> None:
    """Tell when each reward judged."""
    if trace is None:
        return
    for name, span in judgement.spans.items():
        trace.add(REWARD + name, span.asked, span.started, span.ended)


def assign_reward(experience: Experience, judgement: RewardResult) -> None:
    """Write into an experience what the rewards say of it."""
    experience.reward = judgement.reward
    experience.reward_parts = dict(judgement.parts)
    experience.info["outcomes"] = dict(judgement.outcomes)
    if judgement.details:
        experience.info["details"] = dict(judgement.details)
    experience.timings["reward"] = judgement.seconds
