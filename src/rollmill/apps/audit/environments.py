"""Checks of environments: reproducible resets, crashes, and episodes of uninformed policies and of an oracle."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from rollmill.apps.audit.findings import Finding, Severity, list_task_ids, passed_check, skipped_check
from rollmill.apps.audit.oracle import call_oracle, canonical_json
from rollmill.errors import ConfigError
from rollmill.rollout.environments.pool import RunningEnvironment
from rollmill.types import Task

OpenEnvironment = Callable[[Task, int], AbstractAsyncContextManager[RunningEnvironment]]
"""Opens a fresh environment for a task and a seed."""
ActionFunction = Callable[[Task, Any, int], str]
"""(task, observation, turn number) -> action."""

_AT_ONCE = 8
_MALFORMED_ACTIONS = (
    "",
    "\x00",
    "}{",
    "a" * 20_000,
    "9" * 400,
    "\u202e\U0001f9ea",
    "null",
    "[[",
    "-1",
    "<tool_call>{</tool_call>",
)


@dataclass(slots=True)
class AuditEpisode:
    """The record of one episode."""

    task: str
    seen: list[str] = field(default_factory=list)  #: observations as texts
    rewards: list[float] = field(default_factory=list)
    done: bool = False
    failure: str | None = None
    late: bool = False
    seconds: list[float] = field(default_factory=list)  #: duration of each call

    @property
    def total(self) -> float:
        """The sum of its rewards."""
        return sum(self.rewards)

    def same_as(self, other: AuditEpisode) -> bool:
        """True if both episodes were identical."""
        return (self.seen, self.rewards, self.done) == (other.seen, other.rewards, other.done)


class EnvironmentAudit:
    """Runs episodes in environments without a model.

    Args:
        turns: maximum number of actions of an episode.
        limit_s: timeout of a reset or a step.
        full: the reward of a successful episode.
        oracle: a user's policy that succeeds.
    """

    def __init__(
        self,
        open_: OpenEnvironment,
        tasks: Sequence[Task],
        *,
        turns: int,
        limit_s: float,
        full: float,
        oracle: ActionFunction | None = None,
    ) -> None:
        self._open, self._tasks = open_, list(tasks)
        self._turns, self._limit_s, self._full, self._oracle = turns, limit_s, full, oracle
        self._slots = asyncio.Semaphore(_AT_ONCE)
        self._episodes: list[AuditEpisode] = []

    async def run(self) -> list[Finding]:
        first = await self._run_all(_random_act, 1)
        again = await self._run_all(_random_act, 1)
        silent = await self._run_all(lambda task, observation, turn: "", 1)
        strange = await self._run_all(
            lambda task, observation, turn: _MALFORMED_ACTIONS[turn % len(_MALFORMED_ACTIONS)], 1
        )
        right = [] if self._oracle is None else await self._run_all(partial(_oracle_action, self._oracle), 1)
        findings = [self._check_reset(first, again), self._check_steps(first, again)]
        findings += [self._check_uninformed("environment_random", "random words", first)]
        findings += [self._check_uninformed("environment_empty", "an empty action, again and again,", silent)]
        findings += [
            self._check_uninformed("environment_strange", "malformed actions", strange),
            self._check_oracle(right),
        ]
        return [*findings, self._check_failures(), self._check_episodes(first), self._check_time()]

    async def _run_all(self, act: ActionFunction, seed: int) -> list[AuditEpisode]:
        episodes = list(await asyncio.gather(*(self._episode(task, act, seed) for task in self._tasks)))
        self._episodes += episodes
        return episodes

    async def _episode(self, task: Task, act: ActionFunction, seed: int) -> AuditEpisode:
        episode = AuditEpisode(task.id)
        async with self._slots:
            try:
                async with self._open(task, seed) as environment:
                    observation = await self._timed(episode, environment.reset(task, seed))
                    episode.seen.append(canonical_json(observation))
                    for turn in range(self._turns):
                        result = await self._timed(episode, environment.step(act(task, observation, turn)))
                        observation = result.observation
                        episode.seen.append(canonical_json(observation))
                        episode.rewards.append(float(result.reward))
                        if result.done:
                            episode.done = True
                            break
            except ConfigError:  # raised by the oracle
                raise
            except TimeoutError:
                episode.late = True
            except Exception as error:  # an environment may raise anything; the audit reports it
                episode.failure = f"{type(error).__name__}: {error}"
        return episode

    async def _timed(self, episode: AuditEpisode, work: Any) -> Any:
        started = time.perf_counter()
        async with asyncio.timeout(self._limit_s):
            found = await work
        episode.seconds.append(time.perf_counter() - started)
        return found

    # -- checks ------------------------------------------------------------------------------------------------

    def _check_reset(self, first: list[AuditEpisode], again: list[AuditEpisode]) -> Finding:
        different = [a.task for a, b in zip(first, again, strict=True) if a.seen[:1] != b.seen[:1]]
        if not different:
            return passed_check("environment_reset", f"the first observation is reproducible ({len(first)} tasks)")
        named = list_task_ids(different)
        text = f"the first observation differs with equal seeds on {len(different)} of {len(first)} tasks ({named})"
        advice = "take all randomness in `reset` from its `seed`: rollouts of a group are compared with each other"
        return Finding("environment_reset", Severity.PROBLEM, text, advice, different)

    def _check_steps(self, first: list[AuditEpisode], again: list[AuditEpisode]) -> Finding:
        alike = [(a, b) for a, b in zip(first, again, strict=True) if a.seen[:1] == b.seen[:1]]
        different = [a.task for a, b in alike if not a.same_as(b)]
        if not different:
            return passed_check("environment_steps", f"the same actions give the same steps ({len(alike)} episodes)")
        text = f"the same actions from the same start give other steps on {len(different)} of {len(alike)} tasks"
        advice = "take all randomness in `step` from the seed of `reset`, if runs should be reproducible"
        return Finding("environment_steps", Severity.WARNING, f"{text} ({list_task_ids(different)})", advice, different)

    def _check_uninformed(self, check: str, about: str, episodes: list[AuditEpisode]) -> Finding:
        rewarded = [each.task for each in episodes if each.rewards and each.total >= self._full]
        totals = [each.total for each in episodes]
        numbers = {"mean": float(np.mean(totals)), "share": len(rewarded) / len(episodes)}
        text = f"{about} earns {self._full:g} or more on {len(rewarded)} of {len(episodes)} tasks"
        if not rewarded:
            return passed_check(
                check, f"{about} earns {numbers['mean']:.3g} on average, never {self._full:g}", **numbers
            )
        severity = Severity.PROBLEM if numbers["share"] > 0.5 or check != "environment_random" else Severity.WARNING
        advice = "the environment gives rewards without being solved; check what it rewards, or give --full"
        return Finding(check, severity, f"{text} ({list_task_ids(rewarded)})", advice, rewarded, numbers)

    def _check_oracle(self, episodes: list[AuditEpisode]) -> Finding:
        if not episodes:
            return skipped_check("environment_oracle", "the right actions are unknown; give --oracle FILE.py:NAME")
        short = [each.task for each in episodes if each.total < self._full]
        if not short:
            return passed_check(
                "environment_oracle", f"the oracle earns {self._full:g} or more on all {len(episodes)} tasks"
            )
        named = list_task_ids(short)
        text = f"the oracle earns less than {self._full:g} on {len(short)} of {len(episodes)} tasks ({named})"
        return Finding("environment_oracle", Severity.PROBLEM, text, "correct the environment or the oracle", short)

    def _check_failures(self) -> Finding:
        failed = {each.task: each.failure for each in self._episodes if each.failure is not None}
        late = list(dict.fromkeys(each.task for each in self._episodes if each.late))
        count = len(self._episodes)
        crashes, timeouts = sum(e.failure is not None for e in self._episodes), sum(e.late for e in self._episodes)
        numbers = {"episodes": count, "crashes": crashes, "timeouts": timeouts}
        if not failed and not late:
            return passed_check("environment_crashes", f"none of {count} episodes failed or took too long", **numbers)
        text = f"{crashes} of {count} episodes failed and {timeouts} took too long"
        text += (
            f"; the first: task {next(iter(failed))}: {next(iter(failed.values()))}"
            if failed
            else f" ({list_task_ids(late)})"
        )
        advice = "`step` has to accept any text as an action; its observation may tell the policy what was wrong"
        tasks = list(dict.fromkeys([*failed, *late]))
        return Finding("environment_crashes", Severity.PROBLEM, text, advice, tasks, numbers)

    def _check_episodes(self, episodes: list[AuditEpisode]) -> Finding:
        rewards = [reward for each in self._episodes for reward in each.rewards]
        if not rewards:
            return skipped_check("environment_episodes", "no environment took a step")
        lengths = [len(each.rewards) for each in episodes]
        finite = bool(np.all(np.isfinite(rewards)))
        numbers = {
            "mean_turns": float(np.mean(lengths)),
            "done": sum(each.done for each in episodes) / len(episodes),
            "least_reward": float(np.min(rewards)),
            "greatest_reward": float(np.max(rewards)),
        }
        text = (
            f"{numbers['mean_turns']:.1f} turns on average, {numbers['done']:.0%} of random episodes end; "
            f"rewards of steps from {numbers['least_reward']:g} to {numbers['greatest_reward']:g}"
        )
        if not finite:
            advice = "a reward has to be a finite number"
            return Finding("environment_episodes", Severity.PROBLEM, text, advice, numbers=numbers)
        return passed_check("environment_episodes", text, **numbers)

    def _check_time(self) -> Finding:
        seconds = np.array([each for episode in self._episodes for each in episode.seconds] or [0.0])
        p50, p99 = float(np.quantile(seconds, 0.5)), float(np.quantile(seconds, 0.99))
        text = f"{len(seconds)} calls: p50 {1000 * p50:.1f} ms, p99 {1000 * p99:.1f} ms"
        return passed_check("environment_time", text, p50=p50, p99=p99, max=float(seconds.max()))


def _oracle_action(oracle: ActionFunction, task: Task, observation: Any, turn: int) -> str:
    """Return the action of a user's oracle. Raises ConfigError if it raises, or returns no text."""
    found = call_oracle(oracle, task, observation, turn)
    if found is None:
        raise ConfigError(f"--oracle gave no action for task {task.id}, turn {turn}")
    return found


def _random_act(task: Task, observation: Any, turn: int) -> str:
    """Return random words of the observation; they depend on task and turn alone."""
    words = canonical_json(observation).split() or ["go"]
    chosen = random.Random(f"{task.id}:{turn}")
    return " ".join(chosen.choice(words) for _ in range(chosen.randint(1, 3)))
