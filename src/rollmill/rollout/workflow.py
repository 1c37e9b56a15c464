"""Runs a workflow once, with its arguments, and interprets its result."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any, Protocol

from rollmill.config.rollout import SamplingConfig
from rollmill.data.content_parts import hide_pictures, show_pictures
from rollmill.rewards import RewardManager, RewardResult
from rollmill.rewards.values import RewardValue, validate_value
from rollmill.rollout.containers import Container
from rollmill.rollout.policy import Policy, Reply
from rollmill.rollout.recorder import Recorder
from rollmill.types import Completion, Task

RoleReward = RewardValue | RewardResult | tuple[RewardResult, Mapping[str, float]]
"""The reward: a number, a mapping of parts, None to reject the rollout, or the result of `judge`, alone or with a
mapping of further parts to add."""
WorkflowResult = RoleReward | Mapping[str, RoleReward]
"""The reward, or a mapping of the policy's roles to theirs."""
WorkflowFunction = Callable[..., Awaitable[WorkflowResult]]
"""(task, policy, **parts) -> the reward. Parts are `judge`, `environment`, `tools`, `examples` and the names under
`models`, as far as the run has them."""
REJECTED_NO_REWARD = "none"  #: rejection reason if the workflow returned None


@dataclass(slots=True, eq=False)
class Rollout:
    """One attempt at a task."""

    id: str
    task: Task
    group: str
    index: int  #: index in its group
    seed: int
    group_seed: int  #: shared by its group
    sampling: SamplingConfig
    policy: Policy
    recorder: Recorder
    scored: list[tuple[Completion, RewardResult]] = field(default_factory=list)
    container: Container | None = None  #: which its tools and rewards share


ResourceFactory = Callable[[Rollout], AbstractAsyncContextManager[Any]]
"""Creates a workflow argument for one rollout, and closes it at the end."""


class EndpointAccess(Protocol):
    """The workflow argument `endpoint`: an OpenAI-compatible server that is this rollout's policy, and records."""

    @property
    def base_url(self) -> str:
        """URL for OpenAI's clients; ends with /v1."""

    @property
    def address(self) -> str:
        """URL of the server, for Anthropic's clients; /feedback is appended to it."""

    @property
    def api_key(self) -> str:
        """Key of this rollout alone."""

    @property
    def rewards(self) -> dict[str, float]:
        """Rewards posted to /feedback so far, by name."""

    @property
    def called(self) -> bool:
        """True if the policy was asked at least once."""


class PolicyServer(Protocol):
    """Serves the policy to rollouts by programs and frameworks that take a base URL; starts at the first use."""

    def one(self, rollout: Rollout, *, forced: bool = False) -> AbstractAsyncContextManager[EndpointAccess]:
        """Serve one rollout. `forced`: requests cannot change temperature and truncation."""
        ...

    async def close(self) -> None:
        """Stop; may be called twice."""


@dataclass(frozen=True, slots=True)
class RolloutResult:
    """Reward of a rollout. `judgement` belongs to `completion`, if the reward came from `judge`.

    `rejected` is the reason of a rejected rollout. `roles` has the results of roles by their name, in place of one for
    all.
    """

    reward: float | None
    parts: dict[str, float | None]
    completion: Completion | None = None
    judgement: RewardResult | None = None
    extra: Mapping[str, float] = field(default_factory=dict)  #: parts that the workflow adds to the judgement
    rejected: str | None = None
    roles: Mapping[str, RolloutResult] = field(default_factory=dict)

    def with_judgement(self, judgement: RewardResult) -> RolloutResult:
        """Replace the judgement, keeping the extra parts."""
        reward = None if judgement.reward is None else judgement.reward + sum(self.extra.values())
        return replace(self, reward=reward, parts={**judgement.parts, **self.extra}, judgement=judgement)


class Workflow:
    """A workflow with the sources of its arguments, by name, and of its rollouts' containers."""

    def __init__(
        self,
        name: str,
        solve: WorkflowFunction,
        parts: Mapping[str, ResourceFactory],
        container: ResourceFactory | None = None,
    ) -> None:
        self.name = name
        self._solve, self._parts, self._container = solve, dict(parts), container

    async def answer(self, rollout: Rollout) -> WorkflowResult:
        """Run the workflow once. Raises whatever the workflow and its arguments raise."""
        async with AsyncExitStack() as stack:
            if self._container is not None:
                rollout.container = await stack.enter_async_context(self._container(rollout))
            parts = {name: await stack.enter_async_context(made(rollout)) for name, made in self._parts.items()}
            task = show_pictures(rollout.task) if rollout.policy.sees else rollout.task
            return await self._solve(task, rollout.policy, **parts)

    def outcome(self, rollout: Rollout, answer: WorkflowResult) -> RolloutResult:
        """Interpret a workflow's result; None rejects the rollout, unless its steps or branches have rewards.

        Raises TypeError and ValueError for invalid results.
        """
        if isinstance(answer, Mapping) and any(name in answer for name in rollout.policy.role_names):
            return self._outcome_by_role(rollout, answer)
        return self._outcome(rollout, answer)

    def _outcome(self, rollout: Rollout, answer: Any) -> RolloutResult:
        if isinstance(answer, tuple):
            if len(answer) != 2 or not isinstance(answer[0], RewardResult):
                raise TypeError(f"returned {answer!r:.80}; of tuples only (what `judge` gave, a mapping) is a reward")
            return self._with_judgement(rollout, answer[0], _numbers(answer[1]))
        if isinstance(answer, RewardResult):
            return self._with_judgement(rollout, answer, {})
        value = validate_value(answer)
        if value is None:
            recorder = rollout.recorder
            worth = any(each.reward is not None for each in recorder.steps)
            worth |= any(each.reward is not None for each in recorder.calls)
            return RolloutResult(None, {}, rejected=None if worth else REJECTED_NO_REWARD)
        if isinstance(value, dict):
            given = [each for each in value.values() if each is not None]
            return RolloutResult(sum(given) if given else None, dict(value))
        return RolloutResult(value, {self.name: value})

    def _outcome_by_role(self, rollout: Rollout, answer: Mapping[str, Any]) -> RolloutResult:
        """Interpret a mapping of roles to rewards. One with None has no reward; if all have none, the rollout is
        rejected.

        Raises ValueError for keys that are no roles, and like `outcome`.
        """
        known = list(rollout.policy.role_names)
        for name in answer:
            if name not in known:
                listed = ", ".join(f"`{each}`" for each in known)
                raise ValueError(f"returned rewards of roles, and one of `{name}`, which is none; there are {listed}")
        found = {
            name: self._outcome(rollout, {name: each} if isinstance(each, Real) else each)
            for name, each in answer.items()
        }
        rejected = None if any(each.rejected is None for each in found.values()) else REJECTED_NO_REWARD
        return RolloutResult(None, {}, rejected=rejected, roles=found)

    def _with_judgement(self, rollout: Rollout, judgement: RewardResult, extra: Mapping[str, float]) -> RolloutResult:
        for completion, given in reversed(rollout.scored):
            if given is judgement:
                return RolloutResult(None, {}, completion, extra=extra).with_judgement(judgement)
        found = RolloutResult(None, {}, extra=extra).with_judgement(judgement)
        return replace(found, judgement=None)  # of another task or text: no group rewards to add


def _numbers(parts: Any) -> dict[str, float]:
    """Check further parts of a reward. Raises TypeError and ValueError if they are not numbers."""
    value = validate_value(parts) if parts else {}
    if not isinstance(value, dict):
        raise TypeError(f"returned a judgement and {parts!r:.80}; the second has to be a mapping of numbers")
    return {key: part for key, part in value.items() if part is not None}


class RolloutScorer:
    """The workflow argument `judge`: computes the run's rewards of a reply or a text."""

    def __init__(self, rewards: RewardManager, rollout: Rollout) -> None:
        self._rewards, self._rollout = rewards, rollout

    async def __call__(self, answer: Reply | Completion | str, task: Task | None = None) -> RewardResult:
        """Compute the rewards of an answer to the task (or to another one); `.reward` is the number.

        A text is scored as if it were the policy's last reply. Of a reply in a role, only the rewards of that role and
        those of all roles count.
        """
        completion = self._completion(answer)
        calls = self._rollout.recorder.calls
        written = calls[-1:] if isinstance(answer, str) else [each for each in calls if each.completion is completion]
        role = written[0].role if written else None
        scored = hide_pictures(task) if task is not None else self._rollout.task
        judgement = await self._rewards.score(
            scored, completion, group_follows=True, role=role, container=self._rollout.container
        )
        self._rollout.scored.append((completion, judgement))
        return judgement

    def _completion(self, answer: Reply | Completion | str) -> Completion:
        if isinstance(answer, Completion):
            return answer
        if isinstance(answer, Reply):
            return answer.completion
        calls = self._rollout.recorder.calls
        if not calls:
            raise ValueError("there is nothing to score: the policy has not generated anything yet")
        return replace(calls[-1].completion, text=answer, reply=None)
