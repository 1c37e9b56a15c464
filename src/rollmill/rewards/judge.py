"""The judge: every configured reward on a completion, concurrently, summed into one number."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from types import TracebackType
from typing import Any, TypeVar

from rollmill.config.reward import (
    ExactReward,
    FormatReward,
    MathReward,
    ModelReward,
    PythonReward,
    ReasoningGymReward,
    RewardConfig,
)
from rollmill.core.errors import RewardError
from rollmill.core.types import Completion, Task
from rollmill.rewards.base import NOT_APPLICABLE, OK, GroupReward, Judgement, Reward, Verdict
from rollmill.rewards.exact import Exact
from rollmill.rewards.format import Format
from rollmill.rewards.grader import GraderPool
from rollmill.rewards.math import Math
from rollmill.rewards.python import PythonFunction, PythonGroupFunction, load_function
from rollmill.rewards.reasoning_gym import ReasoningGym
from rollmill.rewards.threads import Threads

Result = TypeVar("Result")
_Light = MathReward | ExactReward | FormatReward | ReasoningGymReward | PythonReward


@dataclass(frozen=True, slots=True)
class Part:
    """One reward of a judge: the key of its numbers, its factor in the sum, and what judges."""

    name: str
    weight: float
    reward: Reward | GroupReward


class Judge:
    """Judges completions; any number of judgements may be under way, from any event loop in any thread."""

    def __init__(self, parts: Sequence[Part], graders: GraderPool, threads: Threads) -> None:
        self._single = [part for part in parts if not hasattr(part.reward, "judge_group")]
        self._groupwise = [part for part in parts if hasattr(part.reward, "judge_group")]
        self._weights = {part.name: part.weight for part in parts}
        self._graders, self._threads = graders, threads

    @property
    def weights(self) -> dict[str, float]:
        """Name of every reward -> its factor in the sum."""
        return dict(self._weights)

    @property
    def groupwise(self) -> bool:
        """Whether some reward sees all completions of a task together: then `finish_group` has to follow."""
        return bool(self._groupwise)

    async def judge(self, task: Task, completion: Completion, *, group_follows: bool = False) -> Judgement:
        """Judge one completion; never blocks the event loop.

        Args:
            group_follows: the caller will pass this judgement to `finish_group`; needed when some reward can judge
                groups only.

        Raises:
            RewardError: a reward raised or gave something that is not a reward. It names the reward, the task and the
                completion, and has the original exception as its cause.
        """
        parts = self._single if group_follows else [*self._single, *self._groupwise]
        together = [part.name for part in parts if not hasattr(part.reward, "judge")]
        if together:
            names = ", ".join(together)
            raise RewardError(f"reward `{names}` sees all completions of a task together; judge the whole group")
        started = time.perf_counter()
        verdicts = await _all([_one(part, task, completion) for part in parts])
        named = dict(zip([part.name for part in parts], verdicts, strict=True))
        return self._judgement(named, time.perf_counter() - started)

    async def finish_group(
        self, task: Task, completions: Sequence[Completion], judgements: Sequence[Judgement]
    ) -> list[Judgement]:
        """Add what the group-wise rewards say to the judgements of `judge`. Both sequences are in the same order.

        Raises RewardError like `judge`, and when a reward gives another number of values than there are completions.
        """
        assert len(completions) == len(judgements)
        if not self._groupwise or not completions:
            return list(judgements)
        started = time.perf_counter()
        columns = await _all([_group(part, task, completions) for part in self._groupwise])
        seconds = time.perf_counter() - started
        names = [part.name for part in self._groupwise]
        rows = [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]
        return [self._joined(old, self._judgement(row, seconds)) for old, row in zip(judgements, rows, strict=True)]

    async def judge_group(self, task: Task, completions: Sequence[Completion]) -> list[Judgement]:
        """Judge all completions of a task, in their order. Raises RewardError like `judge` and `finish_group`."""
        judgements = await _all([self.judge(task, each, group_follows=True) for each in completions])
        return await self.finish_group(task, completions, judgements)

    def _judgement(self, verdicts: dict[str, Verdict], seconds: float) -> Judgement:
        parts: dict[str, float | None] = {}
        outcomes: dict[str, str] = {}
        reward: float | None = None
        for name, verdict in verdicts.items():
            found = _keyed(name, verdict)
            given = [value for value in found.values() if value is not None]
            parts |= found
            outcomes[name] = verdict.outcome if given or verdict.outcome != OK else NOT_APPLICABLE
            if given:
                reward = (reward or 0.0) + self._weights[name] * sum(given)
        return Judgement(reward, parts, outcomes, seconds)

    def _joined(self, first: Judgement, second: Judgement) -> Judgement:
        given = [reward for reward in (first.reward, second.reward) if reward is not None]
        return Judgement(
            sum(given) if given else None,
            first.parts | second.parts,
            first.outcomes | second.outcomes,
            first.seconds + second.seconds,
        )

    def close(self) -> None:
        """End the grader processes and the idle threads. Judgements under way fail. May be called twice."""
        self._graders.close()
        self._threads.close()

    async def aclose(self) -> None:
        """`close` without blocking the event loop."""
        await asyncio.to_thread(self.close)

    def __enter__(self) -> Judge:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    async def __aenter__(self) -> Judge:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.aclose()


def build_judge(
    configs: Sequence[RewardConfig], *, workers: int = 1, tokenizer: Any = None, device: str | None = None
) -> Judge:
    """The judge of a run file's `rewards`.

    Rewards of one name are told apart as name, name#2, ...; a Python function goes by its own name. Grader processes
    start when the first answer needs one.

    Args:
        workers: how many grader processes all rewards share.
        tokenizer: what the completions' tokens are of; None where they are text.
        device: where reward models go; None: a GPU where torch finds one.

    Raises:
        ConfigError: a Python function cannot be loaded.
        ModelError: a reward model cannot.
    """
    graders, threads = GraderPool(workers), Threads()
    seen: dict[str, int] = {}
    parts = []
    for config in configs:
        name = _name(config)
        seen[name] = count = seen.get(name, 0) + 1
        key = name if count == 1 else f"{name}#{count}"
        if isinstance(config, ModelReward):
            from rollmill.rewards.model import Model  # the only reward that needs torch

            reward: Reward | GroupReward = Model(config, tokenizer, device)
        else:
            reward = _build(config, graders, threads)
        parts.append(Part(key, config.weight, reward))
    return Judge(parts, graders, threads)


def _keyed(name: str, verdict: Verdict) -> dict[str, float | None]:
    if isinstance(verdict.value, dict):
        return {f"{name}/{key}": value for key, value in verdict.value.items()}
    return {name: verdict.value}


def _name(config: RewardConfig) -> str:
    return PurePath(config.function).name.rpartition(":")[2] if isinstance(config, PythonReward) else config.name


def _build(config: _Light, graders: GraderPool, threads: Threads) -> Reward | GroupReward:
    match config:
        case MathReward():
            return Math(config, graders)
        case ExactReward():
            return Exact(config)
        case FormatReward():
            return Format(config)
        case ReasoningGymReward():
            return ReasoningGym(config, graders)
        case PythonReward():
            function = load_function(config)
            kind = PythonGroupFunction if getattr(function, "group", False) else PythonFunction
            return kind(config, function, threads)


async def _one(part: Part, task: Task, completion: Completion) -> Verdict:
    try:
        return await part.reward.judge(task, completion)  # type: ignore[union-attr]
    except Exception as error:
        raise _failure(part.name, task, f"completion {completion.index}", completion.text, error) from error


async def _group(part: Part, task: Task, completions: Sequence[Completion]) -> list[Verdict]:
    try:
        verdicts: list[Verdict] = await part.reward.judge_group(task, completions)  # type: ignore[union-attr]
        if len(verdicts) != len(completions):
            raise ValueError(f"gave {len(verdicts)} values for {len(completions)} completions; it must give one each")
    except Exception as error:
        which = f"{len(completions)} completions, the first"
        raise _failure(part.name, task, which, completions[0].text, error) from error
    return verdicts


def _failure(name: str, task: Task, which: str, text: str, error: Exception) -> RewardError:
    what = str(error) if isinstance(error, RewardError) else f"{type(error).__name__}: {error}"
    excerpt = text if len(text) <= 120 else f"{text[:50]} ... {text[-65:]}"
    return RewardError(f"reward `{name}` failed on task `{task.id}`: {what}\n  {which}: {excerpt!r}")


async def _all(work: Sequence[Coroutine[Any, Any, Result]]) -> list[Result]:
    """The results in order; when one fails, the others are cancelled and awaited before its error goes on."""
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
