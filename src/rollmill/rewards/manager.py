"""The reward manager: runs all configured rewards on a completion concurrently and combines them into one number.

Gates run first: if one fails, nothing else runs. Then all other rewards of single completions run at once, then those
that need a whole group. Each value is clipped, weighted and added; the sum is clipped.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from rollmill.concurrency import retrieve_error
from rollmill.config.rewards import Reward, RewardManagerConfig, reward_part_names
from rollmill.errors import ConfigError, EndpointLostError, GraderLostError, RewardError, user_code_location
from rollmill.progress import Progress, count_progress
from rollmill.rewards.base import (
    GATED,
    LATE,
    NOT_APPLICABLE,
    OK,
    RewardResult,
    RewardTiming,
    Score,
)
from rollmill.rewards.resources import RewardResources
from rollmill.types import Completion, Task
from rollmill.waiting import patient_timeout
from rollmill_grading.errors import GraderProcessLostError, GradingError

if TYPE_CHECKING:
    from rollmill.rollout.containers import Container

Result = TypeVar("Result")
_GRACE_S = 0.05
"""Seconds for results that arrived while something else blocked the event loop past the deadline."""


_Timed = tuple[Score, RewardTiming]


class RewardManager:
    """Scores completions by prepared rewards, named as in the results. Any number of calls may run concurrently, from
    any event loop in any thread."""

    def __init__(
        self, rewards: Mapping[str, Reward], settings: RewardManagerConfig, resources: RewardResources
    ) -> None:
        self._rewards = dict(rewards)
        self._gates = {name: each for name, each in rewards.items() if each.gate is not None}
        self._groupwise = {
            name: each for name, each in rewards.items() if each.scope != "completion" and each.gate is None
        }
        self._single = {
            name: each for name, each in rewards.items() if name not in self._gates and name not in self._groupwise
        }
        self._settings, self._resources = settings, resources
        self._changes: list[tuple[int, str, float]] = []  # version, reward, weight

    @property
    def weights(self) -> dict[str, float]:
        """Reward name -> factor in the sum, as in the run file."""
        return {name: each.weight for name, each in self._rewards.items()}

    def set_weight(self, name: str, weight: float, from_version: int) -> None:
        """Change the factor of a reward for completions whose newest token is of that version of the policy or of a
        later one, whenever they are scored; so the result does not depend on timing.

        Raises ConfigError naming the rewards if there is no such one.
        """
        if name not in self._rewards:
            known = ", ".join(f"`{each}`" for each in self._rewards) or "none"
            raise ConfigError(f"no reward `{name}`; there are {known}")
        self._changes.append((from_version, name, weight))

    def _weight(self, name: str, version: int) -> float:
        changed = [weight for since, of, weight in self._changes if of == name and since <= version]
        return changed[-1] if changed else self._rewards[name].weight

    @property
    def roles(self) -> set[str]:
        """The roles that have rewards of their own."""
        return {each.role for each in self._rewards.values() if each.role is not None}

    @property
    def groupwise(self) -> bool:
        """True if a reward needs all completions of a task together; then call `add_group_rewards` as well."""
        return bool(self._groupwise)

    def counters(self) -> dict[str, float]:
        """Return the rewards' counters as name/key: calls, tokens and cost of judges. They only grow."""
        return {
            f"{name}/{key}": value for name, each in self._rewards.items() for key, value in each.counters().items()
        }

    async def score(
        self,
        task: Task,
        completion: Completion,
        *,
        group_follows: bool = False,
        role: str | None = None,
        container: Container | None = None,
    ) -> RewardResult:
        """Score one completion; never blocks the event loop.

        Args:
            container: that of the rollout, for the rewards that look into it; without one they do not apply.
            role: role of the policy that it was generated in: rewards of other roles do not score it.
            group_follows: the caller will pass the result to `add_group_rewards`; required if a reward can only score
                groups.

        Raises:
            RewardError: a reward raised or returned an invalid value. It names the reward, the task and the completion,
                and has the original exception as its cause.
        """
        alone = {} if group_follows else _scoring(self._groupwise, task, role)
        together = [name for name, each in alone.items() if each.scope == "group"]
        if together:
            names = ", ".join(together)
            raise RewardError(f"reward `{names}` sees all completions of a task together; score the whole group")
        started = time.perf_counter()
        scores = await self._run_rewards(_scoring(self._gates, task, role), task, completion, container)
        failed_gate = self._find_failed_gate(scores, completion)
        if failed_gate is None:
            scores |= await self._run_rewards(_scoring(self._single, task, role) | alone, task, completion, container)
        last = not (group_follows and self._groupwise)
        found = self._combine(scores, completion, time.perf_counter() - started, failed_gate, last)
        return found if role is None else replace(found, role=role)

    async def add_group_rewards(
        self, task: Task, completions: Sequence[Completion], results: Sequence[RewardResult]
    ) -> list[RewardResult]:
        """Add the group-wise rewards to the results of `score`, which are of one role. Both sequences are in the same
        order.

        Raises RewardError like `score`, and if a reward returns another number of values than there are completions.
        """
        assert len(completions) == len(results)
        groupwise = _scoring(self._groupwise, task, results[0].role) if completions else {}
        if not groupwise:
            return list(results)
        started = time.perf_counter()
        columns = await _gather_or_cancel(
            [self._run_group_reward(name, task, completions, results) for name in groupwise]
        )
        seconds = time.perf_counter() - started
        rows = [dict(zip(groupwise, row, strict=True)) for row in zip(*columns, strict=True)]
        return [
            self._merge(old, completion, row, seconds)
            for old, completion, row in zip(results, completions, rows, strict=True)
        ]

    async def score_group(self, task: Task, completions: Sequence[Completion]) -> list[RewardResult]:
        """Score all completions of a task, in their order. Raises RewardError like `score`."""
        results = await _gather_or_cancel([self.score(task, each, group_follows=True) for each in completions])
        return await self.add_group_rewards(task, completions, results)

    # -- running -----------------------------------------------------------------------------------------------

    async def _run_rewards(
        self, rewards: Mapping[str, Reward], task: Task, completion: Completion, container: Container | None
    ) -> dict[str, _Timed]:
        scores = await _gather_or_cancel([self._run_reward(name, task, completion, container) for name in rewards])
        return dict(zip(rewards, scores, strict=True))

    async def _run_reward(self, name: str, task: Task, completion: Completion, container: Container | None) -> _Timed:
        queued_at = time.perf_counter()
        reward = self._rewards[name]
        try:
            # without waiting if it can: a task of the event loop for the time limit costs more than a quick call
            begun: Score | Awaitable[Score]
            if reward.uses_container:
                begun = Score(None) if container is None else reward.score_container(task, container)
            else:
                begun = reward.begin(task, completion)
            score = begun if isinstance(begun, Score) else await self._in_time(begun)
        except Exception as raised:
            error = _own_error(raised)
            raise _reward_error(name, task, f"completion {completion.index}", completion.text, error) from error
        return _timed(score or Score(reward.timeout_reward, LATE), queued_at)

    async def _run_group_reward(
        self, name: str, task: Task, completions: Sequence[Completion], judged: Sequence[RewardResult]
    ) -> list[_Timed]:
        queued_at = time.perf_counter()
        reward = self._rewards[name]
        try:
            scores = await self._in_time(reward.score_group(task, completions, judged))
            if scores is None:
                scores = [Score(reward.timeout_reward, LATE)] * len(completions)
            if len(scores) != len(completions):
                raise ValueError(f"gave {len(scores)} values for {len(completions)} completions; it must give one each")
        except Exception as raised:
            error = _own_error(raised)
            which = f"{len(completions)} completions, the first"
            raise _reward_error(name, task, which, completions[0].text, error) from error
        return [_timed(score, queued_at) for score in scores]

    async def _in_time(self, work: Awaitable[Result]) -> Result | None:
        """Return the result of `work`; at the deadline cancel it and return None. Outages do not count."""
        pending = asyncio.ensure_future(work)
        pending.add_done_callback(retrieve_error)
        try:
            with suppress(TimeoutError):
                async with patient_timeout(self._settings.deadline_s):
                    await asyncio.wait({pending})
            if not pending.done():
                await asyncio.wait({pending}, timeout=_GRACE_S)
            return pending.result() if pending.done() else None
        finally:
            if not pending.done():
                pending.cancel()
                await asyncio.wait({pending})

    # -- combining ---------------------------------------------------------------------------------------------

    def _find_failed_gate(self, scores: dict[str, _Timed], completion: Completion) -> str | None:
        """Return the failed gate that decides the reward: the one with the lowest `otherwise`. None if all pass.

        A gate that is not active yet (`after_steps`) passes everything.
        """
        failed = {}
        for name, (score, _) in scores.items():
            config = self._rewards[name]
            values = [value for value in self._named_values(name, score).values() if value is not None]
            active = bool(values) and _policy_version(completion) >= config.after_steps
            if config.gate is not None and active and sum(values) < config.gate.at_least:
                failed[name] = config.gate.otherwise
        return min(failed, key=lambda name: failed[name]) if failed else None

    def _combine(
        self, scores: dict[str, _Timed], completion: Completion, seconds: float, failed_gate: str | None, last: bool
    ) -> RewardResult:
        parts: dict[str, float | None] = {}
        outcomes: dict[str, str] = {}
        counted: list[float] = []
        for name, (score, _) in scores.items():
            values = self._named_values(name, score)
            applied = [value for value in values.values() if value is not None]
            parts |= values
            outcomes[name] = score.outcome if applied or score.outcome != OK else NOT_APPLICABLE
            config = self._rewards[name]
            if applied and (version := _policy_version(completion)) >= config.after_steps:
                counted.append(self._weight(name, version) * sum(applied))
        spans = {name: span for name, (_, span) in scores.items()}
        details = {f"{name}/{key}": value for name, (each, _) in scores.items() for key, value in each.details.items()}
        boxes = tuple(dict.fromkeys(box for score, _ in scores.values() for box in score.boxes))
        if failed_gate is not None:
            gate = self._rewards[failed_gate].gate
            assert gate is not None
            skipped = dict.fromkeys([*self._single, *(self._groupwise if last else [])], GATED)
            return RewardResult(
                gate.otherwise, parts, outcomes | skipped, seconds, spans, failed_gate, details, boxes=boxes
            )
        reward = sum(counted) if counted else None
        total = self._clip_sum(reward) if last else reward
        return RewardResult(total, parts, outcomes, seconds, spans, details=details, boxes=boxes)

    def _merge(self, old: RewardResult, completion: Completion, row: dict[str, _Timed], seconds: float) -> RewardResult:
        new = self._combine(row, completion, seconds, None, last=False)
        rewards = [reward for reward in (old.reward, new.reward) if reward is not None]
        total = self._clip_sum(sum(rewards) if rewards else None)
        return replace(
            old,
            reward=old.reward if old.failed_gate else total,
            parts=old.parts | new.parts,
            outcomes=old.outcomes | new.outcomes,
            seconds=old.seconds + new.seconds,
            spans=old.spans | new.spans,
            details=old.details | new.details,
            boxes=(*old.boxes, *(box for box in new.boxes if box not in old.boxes)),
        )

    def _clip_sum(self, reward: float | None) -> float | None:
        return None if reward is None else _clip(reward, self._settings.clip)

    def _named_values(self, name: str, score: Score) -> dict[str, float | None]:
        clip = self._rewards[name].clip
        if isinstance(score.value, dict):
            return {
                f"{name}/{key}": None if value is None else _clip(value, clip) for key, value in score.value.items()
            }
        return {name: None if score.value is None else _clip(score.value, clip)}

    # -- closing -----------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop the processes and idle threads. Calls in progress fail. May be called twice."""
        self._resources.close()

    def keep_warm(self) -> None:
        """`close`, but the processes that graded for it start in the background, and the next manager of this process
        with such rewards takes them over. So its first score does not wait for them."""
        self._resources.keep_warm()

    async def aclose(self) -> None:
        """`close` without blocking the event loop."""
        await asyncio.to_thread(self.close)

    def __enter__(self) -> RewardManager:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    async def __aenter__(self) -> RewardManager:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.aclose()


def _scoring(rewards: Mapping[str, Reward], task: Task, role: str | None) -> dict[str, Reward]:
    """Return the rewards that score a role's replies to a task: all of the role, or those that the task's row names."""
    named = {name: each for name, each in rewards.items() if task.rewards is None or name in task.rewards}
    return {name: each for name, each in named.items() if each.role in (None, role)}


def _timed(score: Score, queued_at: float) -> _Timed:
    count_progress(Progress.VERDICTS)
    now = time.perf_counter()  # later than the end of the work if something else blocked the event loop
    started = min(queued_at + score.queue_s, now)
    return score, RewardTiming(queued_at, started, now if score.run_s is None else min(started + score.run_s, now))


def _clip(value: float, bounds: tuple[float, float] | None) -> float:
    return value if bounds is None else min(max(value, bounds[0]), bounds[1])


def _policy_version(completion: Completion) -> int:
    """Return the newest weight version (training step) that wrote the completion; 0 for text without a policy."""
    return int(completion.versions.max()) if completion.versions.size else 0


def _own_error(error: Exception) -> Exception:
    """Return the loss of grader processes as an error after which a run may start again; any other error unchanged."""
    if not isinstance(error, GraderProcessLostError):
        return error
    return GraderLostError(str(error)).with_traceback(error.__traceback__)


def _reward_error(name: str, task: Task, which: str, text: str, error: Exception) -> RewardError:
    what = str(error) if isinstance(error, RewardError | GradingError) else f"{type(error).__name__}: {error}"
    place = user_code_location(error)  # a reward process has added it already, as its errors have no frames here
    what += f" ({place})" if place else ""
    excerpt = text if len(text) <= 120 else f"{text[:50]} ... {text[-65:]}"
    kind = EndpointLostError if isinstance(error, EndpointLostError) else RewardError
    return kind(f"reward `{name}` failed on task `{task.id}`: {what}\n  {which}: {excerpt!r}")


async def _gather_or_cancel(work: Sequence[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Return the results in order; if one fails, cancel and await the others, then raise its error."""
    if len(work) == 1:
        return [await work[0]]
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


# Builds the RewardManager from a run file's `rewards`.


def build_reward_manager(
    rewards: Sequence[Reward],
    settings: RewardManagerConfig | None = None,
    *,
    tokenizer: Any = None,
    device: str | None = None,
) -> RewardManager:
    """Build the manager for a run file's `rewards` and `reward_settings`.

    Rewards with the same name become name, name#2, ...; a Python function uses its own name. Worker processes start
    with the first completion that needs one.

    Args:
        tokenizer: the tokenizer of the completions' tokens; None if completions are text.
        device: the device for reward models; None: a GPU if torch finds one.

    Raises:
        ConfigError: a Python function cannot be loaded, a judge's endpoint lacks its key, or a reward that compares
            completions is a gate.
        ModelError: a reward model or a judge cannot be loaded.
        SandboxError: a package that code may use is not installed.
    """
    settings = settings or RewardManagerConfig()
    resources = RewardResources(settings.workers, tokenizer, device)
    prepared: dict[str, Reward] = {}
    try:
        for name, reward in zip(reward_part_names(rewards), rewards, strict=True):
            prepared[name] = reward.prepare(resources)
            if prepared[name].scope == "group" and reward.gate is not None:
                raise ConfigError(f"reward `{name}` compares completions, so it cannot be a gate; remove its `gate`")
    except BaseException:
        resources.close()
        raise
    return RewardManager(prepared, settings, resources)
