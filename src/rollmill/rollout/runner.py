"""Runs a workflow for every rollout of a group, with retries, and builds experiences with rewards from the records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

from rollmill.concurrency import gather_or_cancel
from rollmill.config.rollout import RolloutConfig, SamplingConfig
from rollmill.config.workflows import RoleConfig
from rollmill.data.layouts import SWITCHES
from rollmill.engines.base import RolloutEngine
from rollmill.errors import ContextLengthError, EpisodeError, RollmillError, WorkflowError, user_code_location
from rollmill.rewards import RewardManager, RewardResult
from rollmill.rollout.chat import ChatRenderer
from rollmill.rollout.policy import Policy
from rollmill.rollout.recorder import REPETITION_KEY, Recorder
from rollmill.rollout.workflow import Rollout, RolloutResult, Workflow
from rollmill.seeds import derive_seed
from rollmill.trackers.trace import REWARD, Trace
from rollmill.types import Experience, Task, split_by_role
from rollmill.waiting import patient_timeout

FAILURE_TIMEOUT, FAILURE_ENVIRONMENT, FAILURE_CONTEXT, FAILURE_WORKFLOW = "late", "environment", "context", "workflow"
"""Reasons of a failed attempt: timeout, environment, prompt longer than the model's context, anything else."""


class RetryingWorkflow:
    """Runs rollouts with retries, and counts failures.

    An attempt fails if its environment or workflow raises or it takes too long. Errors of configuration, rewards and
    engines always end the run.

    Args:
        needs_reward: rollouts without a reward are useless, so a workflow that returns None rejects its rollout.
    """

    def __init__(self, workflow: Workflow, limits: RolloutConfig, *, needs_reward: bool = True) -> None:
        self._workflow, self._limits, self._needs_reward = workflow, limits, needs_reward
        self._counted: Counter[str] = Counter()

    @property
    def name(self) -> str:
        return self._workflow.name

    async def run(self, begin: Callable[[int], Rollout]) -> tuple[Rollout, RolloutResult]:
        """Run a rollout until an attempt succeeds; return the last attempt and its result. `begin` creates attempts 0,
        1...

        Raises:
            WorkflowError: all attempts failed, and rollout.failures is `stop`; names task, rollout, file and line. Or
                the workflow returned an invalid reward.
            RollmillError: configuration, a reward or an engine failed.
        """
        for number in range(self._limits.attempts):
            rollout = begin(number)
            self._counted["retries"] += number > 0
            try:
                answer = await self._in_time(rollout)
            except (Exception, SystemExit) as error:
                last = number + 1 == self._limits.attempts
                kind = self._failure(rollout, error)
                if not last:
                    continue
                if self._limits.failures == "stop":
                    self._stop(rollout, error)
                return rollout, self._rejected(RolloutResult(None, {}, rejected=kind))
            return rollout, self._rejected(self._valued(rollout, answer))
        raise AssertionError("there is at least one try")

    def take_counts(self) -> dict[str, float]:
        """Counts since the last call: retries; failed attempts, in all and by reason; rejected rollouts."""
        found, self._counted = self._counted, Counter()
        return {key: float(found[key]) for key in ("retries", "failed", "rejected", FAILURE_TIMEOUT, *sorted(found))}

    async def _in_time(self, rollout: Rollout) -> Any:
        """Run the workflow. Raises TimeoutError past the limit; its engine calls are aborted then."""
        try:
            async with patient_timeout(self._limits.time_limit_s) as limit:
                return await self._workflow.answer(rollout)
        except TimeoutError as error:
            if limit.expired():
                text = f"it took longer than rollout.time_limit_s ({self._limits.time_limit_s:g} s)"
                raise _RolloutTimeoutError(text) from error.__cause__
            raise

    def _failure(self, rollout: Rollout, error: BaseException) -> str:
        """Count a failed attempt and return its reason. Re-raises errors that are not the workflow's."""
        for each in _flatten_errors(error):
            if isinstance(each, RollmillError) and not isinstance(each, WorkflowError | ContextLengthError):
                raise each
        kind = _kind(error)
        self._counted["failed"] += 1
        self._counted[kind if kind == FAILURE_TIMEOUT else f"failed/{kind}"] += 1
        return kind

    def _valued(self, rollout: Rollout, answer: Any) -> RolloutResult:
        try:
            outcome = self._workflow.outcome(rollout, answer)
        except (TypeError, ValueError) as error:
            raise WorkflowError(f"{self._who(rollout)}: {error}") from error
        return outcome if self._needs_reward else replace(outcome, rejected=None)

    def _rejected(self, outcome: RolloutResult) -> RolloutResult:
        self._counted["rejected"] += outcome.rejected is not None
        return outcome

    def _stop(self, rollout: Rollout, error: BaseException) -> NoReturn:
        tries = f" ({self._limits.attempts} tries)" if self._limits.attempts > 1 else ""
        what = (
            str(error)
            if isinstance(error, RollmillError | _RolloutTimeoutError)
            else f"{type(error).__name__}: {error}"
        )
        place = user_code_location(error.__cause__ or error)
        raise WorkflowError(f"{self._who(rollout)}{tries}: {place and f'{place}: '}{what}{_ADVICE}") from error

    def _who(self, rollout: Rollout) -> str:
        return f"workflow `{self._workflow.name}` failed on task `{rollout.task.id}`, rollout {rollout.index}"


class _RolloutTimeoutError(Exception):
    """A rollout took longer than its time limit."""


_ADVICE = ". Fix it, or set rollout.attempts or rollout.failures: reject"


def _kind(error: BaseException) -> str:
    kinds: dict[type[Exception], str] = {
        _RolloutTimeoutError: FAILURE_TIMEOUT,
        EpisodeError: FAILURE_ENVIRONMENT,
        ContextLengthError: FAILURE_CONTEXT,
    }
    return next((kind for type_, kind in kinds.items() if isinstance(error, type_)), FAILURE_WORKFLOW)


def _flatten_errors(error: BaseException) -> list[BaseException]:
    """The errors inside exception groups, one by one."""
    return (
        [leaf for each in error.exceptions for leaf in _flatten_errors(each)]
        if isinstance(error, BaseExceptionGroup)
        else [error]
    )


REPETITION_PENALTY = "rollout/repetition"  #: reward part: the repetition penalty
RETRY_STREAM = 0x7E7  # keeps random numbers of a rollout's attempts apart


class WorkflowRunner:
    """Rolls out groups by a workflow. `trace` records completions and reward times.

    Args:
        rewards: computes the rewards that compare whole groups; the workflow's own rewards do not need it.
        roles: those that the policy may play; empty: any.
    """

    def __init__(
        self,
        attempts: RetryingWorkflow,
        engine: RolloutEngine,
        chat: ChatRenderer,
        rewards: RewardManager,
        trace: Trace | None = None,
        roles: Mapping[str, RoleConfig] | None = None,
    ) -> None:
        self._attempts, self._engine, self._chat = attempts, engine, chat
        self._rewards, self._trace, self._roles = rewards, trace, roles

    async def group(self, task: Task, sampling: SamplingConfig, *, n: int, seed: int, group: str) -> list[Experience]:
        """Return the experiences of n rollouts, with rewards, ordered by rollout; rejected ones have the reason in
        `info`.

        Raises:
            WorkflowError: the workflow failed, or returned an invalid reward.
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
        """Counts of rollouts since the last call, see RetryingWorkflow."""
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
            roles=self._roles,
            switches=task.metadata.get(SWITCHES),
        )
        return Rollout(id, task, group, index, seed, group_seed, sampling, policy, recorder)

    async def _finished(self, task: Task, outcomes: list[RolloutResult]) -> list[RolloutResult]:
        """Add the rewards that compare whole groups; of roles, those that compare the replies of each."""
        if not self._rewards.groupwise:
            return outcomes
        for name in dict.fromkeys(name for each in outcomes for name in each.roles):
            played = [index for index, each in enumerate(outcomes) if name in each.roles]
            found = await self._compared(task, [outcomes[index].roles[name] for index in played])
            for index, result in zip(played, found, strict=True):
                outcomes[index] = replace(outcomes[index], roles={**outcomes[index].roles, name: result})
        return await self._compared(task, outcomes)

    async def _compared(self, task: Task, outcomes: list[RolloutResult]) -> list[RolloutResult]:
        outcomes = list(outcomes)
        judged = [(i, each.completion, each.judgement) for i, each in enumerate(outcomes) if each.judgement is not None]
        completions = [completion for _, completion, _ in judged if completion is not None]
        found = await self._rewards.add_group_rewards(task, completions, [judgement for _, _, judgement in judged])
        for (index, _, _), judgement in zip(judged, found, strict=True):
            outcomes[index] = outcomes[index].with_judgement(judgement)
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
                experience.rejected = outcome.rejected
            return experiences
        alone = [each for each in experiences if each.reward is not None]  # rewards set by the workflow
        shared = [each for each in experiences if each.reward is None]
        for experience in alone:
            assert experience.reward is not None
            experience.reward_parts = {self._attempts.name: experience.reward}
            experience.step_reward = experience.reward
        by_role = split_by_role(shared)
        for branches in by_role:
            result = self._result_of(rollout, outcome, branches)
            if result.judgement is not None:
                for experience in branches:
                    assign_reward(experience, result.judgement)
            _reward(branches, rollout.recorder, result, forked=len(experiences) > 1)
        for judged in (outcome, *outcome.roles.values()):
            if judged.judgement is not None:
                trace_reward_result(self._trace, judged.judgement)
        for branches in (*by_role, *([each] for each in alone)):
            apply_repetition_penalty(branches, rollout.sampling, any(REPETITION_KEY in each.info for each in branches))
        return experiences

    def _result_of(self, rollout: Rollout, outcome: RolloutResult, branches: Sequence[Experience]) -> RolloutResult:
        """Return the result that belongs to a role's branches, which have no reward of their own.

        Raises WorkflowError: the workflow returned rewards of other roles only.
        """
        role, judged = branches[0].role, outcome.judgement
        if role is not None and role in outcome.roles:
            return outcome.roles[role]
        is_others = judged is not None and judged.role != role and bool(self._rewards.roles)
        if not outcome.roles and not is_others:
            return outcome
        if not any(each.action_tokens for each in branches):
            return RolloutResult(None, {})
        who = "what the policy generated outside of its roles" if role is None else f"the role `{role}`"
        raise WorkflowError(
            f"workflow `{self._attempts.name}` on task `{rollout.task.id}`: it returned rewards, and none for {who}; "
            "return a mapping with every role, {NAME: reward, ...}, or give the replies theirs with policy.reward"
        )


def _reward(experiences: Sequence[Experience], recorder: Recorder, outcome: RolloutResult, *, forked: bool) -> None:
    """Set the rollout's reward in all experiences. Reward earned at the end belongs to the last step."""
    steps = [each.reward for each in recorder.steps if each.reward is not None]
    reward = outcome.reward if not steps else sum(steps) + (outcome.reward or 0.0)
    for experience in experiences:
        experience.reward = reward
        experience.reward_parts = {**outcome.parts, "steps": sum(steps)} if steps else dict(outcome.parts)
        if reward is None:
            experience.step_reward = None
        elif forked:
            experience.step_reward = experience.step_reward or 0.0
    if experiences and experiences[-1].step_reward is not None:
        experiences[-1].step_reward += outcome.reward or 0.0


def apply_repetition_penalty(experiences: Sequence[Experience], sampling: SamplingConfig, repeated: bool) -> None:
    """Subtract `repetition.penalty` from a rollout's reward if one of its completions ended by repetition.

    Every rollout with a reward gets the part, 0 or not, for advantages that compare parts. One without a reward stays
    so.
    """
    if sampling.repetition is None or not sampling.repetition.penalty:
        return
    value = -sampling.repetition.penalty if repeated else 0.0
    for experience in experiences:
        if experience.reward is not None:
            experience.reward += value
            experience.reward_parts[REPETITION_PENALTY] = value
    if experiences and experiences[-1].step_reward is not None:
        experiences[-1].step_reward += value


def trace_reward_result(trace: Trace | None, result: RewardResult) -> None:
    """Record when each reward was computed."""
    if trace is None:
        return
    for name, span in result.spans.items():
        trace.add(REWARD + name, span.requested, span.started, span.ended)


def assign_reward(experience: Experience, result: RewardResult) -> None:
    """Set an experience's reward, parts and details."""
    experience.reward = result.reward
    experience.reward_parts = dict(result.parts)
    experience.info["outcomes"] = dict(result.outcomes)
    if result.details:
        experience.info["details"] = dict(result.details)
    if result.boxes:
        experience.info["boxes"] = [list(box) for box in result.boxes]
    experience.timings["reward"] = result.seconds
