"""The judge: every configured reward on a completion, concurrently, composed into one number.

Gates come first: where one is not passed, nothing else is judged. Then all other rewards of single completions at once,
then those that see a whole group. Each number is clipped, weighted and added; the sum is clipped.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Coroutine, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, TypeVar

from rollmill.config.rewards import (
    CitationReward,
    CodeReward,
    ExactReward,
    FormatReward,
    JudgeReward,
    K12Reward,
    LanguageReward,
    LengthReward,
    MathReward,
    ModelReward,
    PairwiseReward,
    PythonReward,
    RankingReward,
    ReasoningGymReward,
    RepetitionReward,
    RewardConfig,
    RewardSection,
    ToolCallReward,
    VisionReward,
)
from rollmill.config.rewards.base import RewardManagerConfig
from rollmill.config.rewards.names import reward_part_names
from rollmill.errors import ConfigError, RewardError
from rollmill.rewards.base import (
    GATED,
    LATE,
    NOT_APPLICABLE,
    OK,
    GroupReward,
    Reward,
    RewardResult,
    RewardTiming,
    Score,
    SupportsCounters,
)
from rollmill.rewards.resources import RewardResources
from rollmill.types import Completion, Task

Result = TypeVar("Result")
_GRACE_S = 0.05
"""For results that arrived while something else held the event loop until after the deadline."""


@dataclass(frozen=True, slots=True)
class WeightedReward:
    """One reward of a judge: the key of its numbers, how they count, and what judges."""

    name: str
    config: RewardSection
    reward: Reward | GroupReward

    @property
    def groupwise(self) -> bool:
        """Whether it judges groups. A gate judges alone if it can."""
        alone = self.config.gate is not None and hasattr(self.reward, "judge")
        return hasattr(self.reward, "judge_group") and not alone


_Timed = tuple[Score, RewardTiming]


class RewardManager:
    """Judges completions; any number of judgements may be under way, from any event loop in any thread."""

    def __init__(
        self, parts: Sequence[WeightedReward], judging: RewardManagerConfig, resources: RewardResources
    ) -> None:
        single = [part for part in parts if not part.groupwise]
        self._parts = {part.name: part for part in parts}
        self._gates = [part for part in single if part.config.gate is not None]
        self._single = [part for part in single if part.config.gate is None]
        self._groupwise = [part for part in parts if part.groupwise]
        self._judging, self._resources = judging, resources

    @property
    def weights(self) -> dict[str, float]:
        """Name of every reward -> its factor in the sum."""
        return {name: part.config.weight for name, part in self._parts.items()}

    @property
    def groupwise(self) -> bool:
        """Whether some reward sees all completions of a task together: then `finish_group` has to follow."""
        return bool(self._groupwise)

    def counters(self) -> dict[str, float]:
        """What rewards that count say so far, as name/key: calls, tokens and cost of judges. They only grow."""
        counting = {
            name: part.reward for name, part in self._parts.items() if isinstance(part.reward, SupportsCounters)
        }
        return {f"{name}/{key}": value for name, reward in counting.items() for key, value in reward.counters().items()}

    async def judge(self, task: Task, completion: Completion, *, group_follows: bool = False) -> RewardResult:
        """Judge one completion; never blocks the event loop.

        Args:
            group_follows: the caller will pass this judgement to `finish_group`; needed when some reward can judge
                groups only.

        Raises:
            RewardError: a reward raised or gave something that is not a reward. It names the reward, the task and the
                completion, and has the original exception as its cause.
        """
        alone = [] if group_follows else self._groupwise
        together = [part.name for part in alone if not hasattr(part.reward, "judge")]
        if together:
            names = ", ".join(together)
            raise RewardError(f"reward `{names}` sees all completions of a task together; judge the whole group")
        started = time.perf_counter()
        found = await self._asked(self._gates, task, completion)
        closed_by = self._find_failed_gate(found, completion)
        if closed_by is None:
            found |= await self._asked([*self._single, *alone], task, completion)
        last = not (group_follows and self._groupwise)
        return self._judgement(found, completion, time.perf_counter() - started, closed_by, last)

    async def add_group_rewards(
        self, task: Task, completions: Sequence[Completion], judgements: Sequence[RewardResult]
    ) -> list[RewardResult]:
        """Add what the group-wise rewards say to the judgements of `judge`. Both sequences are in the same order.

        Raises RewardError like `judge`, and when a reward gives another number of values than there are completions.
        """
        assert len(completions) == len(judgements)
        if not self._groupwise or not completions:
            return list(judgements)
        started = time.perf_counter()
        columns = await _gather_or_cancel(
            [self._group(part, task, completions, judgements) for part in self._groupwise]
        )
        seconds = time.perf_counter() - started
        names = [part.name for part in self._groupwise]
        rows = [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]
        return [
            self._joined(old, completion, row, seconds)
            for old, completion, row in zip(judgements, completions, rows, strict=True)
        ]

    async def judge_group(self, task: Task, completions: Sequence[Completion]) -> list[RewardResult]:
        """Judge all completions of a task, in their order. Raises RewardError like `judge` and `finish_group`."""
        judgements = await _gather_or_cancel([self.judge(task, each, group_follows=True) for each in completions])
        return await self.add_group_rewards(task, completions, judgements)

    # -- asking ------------------------------------------------------------------------------------------------

    async def _asked(self, parts: Sequence[WeightedReward], task: Task, completion: Completion) -> dict[str, _Timed]:
        found = await _gather_or_cancel([self._one(part, task, completion) for part in parts])
        return dict(zip([part.name for part in parts], found, strict=True))

    async def _one(self, part: WeightedReward, task: Task, completion: Completion) -> _Timed:
        asked = time.perf_counter()
        try:
            verdict = await self._in_time(part.reward.judge(task, completion))  # type: ignore[union-attr]
        except Exception as error:
            raise _reward_error(part.name, task, f"completion {completion.index}", completion.text, error) from error
        return _timed(verdict or Score(part.config.timeout_reward, LATE), asked)

    async def _group(
        self, part: WeightedReward, task: Task, completions: Sequence[Completion], judged: Sequence[RewardResult]
    ) -> list[_Timed]:
        asked = time.perf_counter()
        try:
            verdicts = await self._in_time(part.reward.judge_group(task, completions, judged))  # type: ignore[union-attr]
            if verdicts is None:
                verdicts = [Score(part.config.timeout_reward, LATE)] * len(completions)
            if len(verdicts) != len(completions):
                raise ValueError(
                    f"gave {len(verdicts)} values for {len(completions)} completions; it must give one each"
                )
        except Exception as error:
            which = f"{len(completions)} completions, the first"
            raise _reward_error(part.name, task, which, completions[0].text, error) from error
        return [_timed(verdict, asked) for verdict in verdicts]

    async def _in_time(self, work: Awaitable[Result]) -> Result | None:
        """What `work` gives; None where the deadline came first, and then it is cancelled."""
        pending = asyncio.ensure_future(work)
        try:
            for seconds in (self._judging.deadline_s, _GRACE_S):
                await asyncio.wait({pending}, timeout=seconds)
                if pending.done():
                    return pending.result()
            return None
        finally:
            if not pending.done():
                pending.cancel()
                await asyncio.wait({pending})

    # -- composing ---------------------------------------------------------------------------------------------

    def _find_failed_gate(self, found: dict[str, _Timed], completion: Completion) -> str | None:
        """The gate that decides the reward of a completion: of those not passed, the one that leaves least.

        A gate that does not count yet (`after_steps`) lets everything pass.
        """
        closed = {}
        for name, (verdict, _) in found.items():
            config = self._parts[name].config
            given = [value for value in self._named_values(name, verdict).values() if value is not None]
            counts = bool(given) and _steps_made(completion) >= config.after_steps
            if config.gate is not None and counts and sum(given) < config.gate.at_least:
                closed[name] = config.gate.otherwise
        return min(closed, key=lambda name: closed[name]) if closed else None

    def _judgement(
        self, found: dict[str, _Timed], completion: Completion, seconds: float, closed_by: str | None, last: bool
    ) -> RewardResult:
        parts: dict[str, float | None] = {}
        outcomes: dict[str, str] = {}
        counted: list[float] = []
        for name, (verdict, _) in found.items():
            values = self._named_values(name, verdict)
            given = [value for value in values.values() if value is not None]
            parts |= values
            outcomes[name] = verdict.outcome if given or verdict.outcome != OK else NOT_APPLICABLE
            config = self._parts[name].config
            if given and _steps_made(completion) >= config.after_steps:
                counted.append(config.weight * sum(given))
        spans = {name: span for name, (_, span) in found.items()}
        details = {f"{name}/{key}": value for name, (each, _) in found.items() for key, value in each.details.items()}
        if closed_by is not None:
            gate = self._parts[closed_by].config.gate
            assert gate is not None
            unasked = [*self._single, *(self._groupwise if last else [])]
            skipped = dict.fromkeys((part.name for part in unasked), GATED)
            return RewardResult(gate.otherwise, parts, outcomes | skipped, seconds, spans, closed_by, details)
        reward = sum(counted) if counted else None
        return RewardResult(self._clipped(reward) if last else reward, parts, outcomes, seconds, spans, details=details)

    def _joined(
        self, old: RewardResult, completion: Completion, row: dict[str, _Timed], seconds: float
    ) -> RewardResult:
        new = self._judgement(row, completion, seconds, None, last=False)
        given = [reward for reward in (old.reward, new.reward) if reward is not None]
        total = self._clipped(sum(given) if given else None)
        return replace(
            old,
            reward=old.reward if old.failed_gate else total,
            parts=old.parts | new.parts,
            outcomes=old.outcomes | new.outcomes,
            seconds=old.seconds + new.seconds,
            spans=old.spans | new.spans,
            details=old.details | new.details,
        )

    def _clipped(self, reward: float | None) -> float | None:
        return None if reward is None else _clip(reward, self._judging.clip)

    def _named_values(self, name: str, verdict: Score) -> dict[str, float | None]:
        clip = self._parts[name].config.clip
        if isinstance(verdict.value, dict):
            return {
                f"{name}/{key}": None if value is None else _clip(value, clip) for key, value in verdict.value.items()
            }
        return {name: None if verdict.value is None else _clip(verdict.value, clip)}

    # -- closing -----------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the processes and idle threads. Judgements under way fail. May be called twice."""
        self._resources.close()

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


def _timed(verdict: Score, asked: float) -> _Timed:
    now = time.perf_counter()  # later than the end of the work where something else held the event loop
    started = min(asked + verdict.queue_s, now)
    return verdict, RewardTiming(asked, started, now if verdict.run_s is None else min(started + verdict.run_s, now))


def _clip(value: float, bounds: tuple[float, float] | None) -> float:
    return value if bounds is None else min(max(value, bounds[0]), bounds[1])


def _steps_made(completion: Completion) -> int:
    """Training steps of the newest weights that wrote the completion; none for text that no policy wrote."""
    return int(completion.versions.max()) if completion.versions.size else 0


def _reward_error(name: str, task: Task, which: str, text: str, error: Exception) -> RewardError:
    what = str(error) if isinstance(error, RewardError) else f"{type(error).__name__}: {error}"
    excerpt = text if len(text) <= 120 else f"{text[:50]} ... {text[-65:]}"
    return RewardError(f"reward `{name}` failed on task `{task.id}`: {what}\n  {which}: {excerpt!r}")


async def _gather_or_cancel(work: Sequence[Coroutine[Any, Any, Result]]) -> list[Result]:
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


# From a run file's `rewards` to a judge.


def build_reward_manager(
    configs: Sequence[RewardConfig],
    judging: RewardManagerConfig | None = None,
    *,
    tokenizer: Any = None,
    device: str | None = None,
) -> RewardManager:
    """The judge of a run file's `rewards` and `judging`.

    Rewards of one name are told apart as name, name#2, ...; a Python function goes by its own name. Processes start
    when the first completion needs one.

    Args:
        tokenizer: what the completions' tokens are of; None where they are text.
        device: where reward models go; None: a GPU where torch finds one.

    Raises:
        ConfigError: a Python function cannot be loaded, a judge's endpoint lacks its key, or a reward that compares
            completions is a gate.
        ModelError: a reward model or a judge cannot be loaded.
        SandboxError: a package that code may use is not installed.
    """
    judging = judging or RewardManagerConfig()
    resources = RewardResources(judging.workers, tokenizer, device)
    parts = []
    try:
        for name, config in zip(reward_part_names(configs), configs, strict=True):
            part = WeightedReward(name, config, build_reward(config, resources))
            if part.groupwise and config.gate is not None:
                raise ConfigError(f"reward `{name}` compares completions, so it cannot be a gate; remove its `gate`")
            parts.append(part)
    except BaseException:
        resources.close()
        raise
    return RewardManager(parts, judging, resources)


def build_reward(config: RewardConfig, resources: RewardResources) -> Reward | GroupReward:
    """One reward. Libraries are imported here, so that a run pays for those it uses only."""
    match config:
        case MathReward():
            from rollmill.rewards.math import MathScorer

            return MathScorer(config, resources.graders)
        case ReasoningGymReward():
            from rollmill.rewards.reasoning_gym import ReasoningGymScorer

            return ReasoningGymScorer(config, resources.graders)
        case PythonReward():
            from rollmill.rewards.python import build_python_reward

            return build_python_reward(config, resources)
        case ModelReward():
            from rollmill.rewards.reward_model import RewardModelScorer

            return RewardModelScorer(config, resources.tokenizer, resources.device)
        case CodeReward():
            from rollmill.rewards.code.reward import CodeScorer

            return CodeScorer(config, resources)
        case K12Reward():
            from rollmill.rewards.k12 import K12Scorer

            return K12Scorer(config, resources)
        case JudgeReward():
            from rollmill.rewards.judges.generative import GenerativeJudge

            return GenerativeJudge(config, resources)
        case PairwiseReward():
            from rollmill.rewards.judges.pairwise import build_pairwise_judge

            return build_pairwise_judge(config, resources)
        case RankingReward():
            from rollmill.rewards.judges.ranking import RankingJudge

            return RankingJudge(config, resources)
        case VisionReward():
            from rollmill.rewards.vision.build import build_vision_reward

            return build_vision_reward(config)
        case (
            ExactReward()
            | FormatReward()
            | LanguageReward()
            | LengthReward()
            | RepetitionReward()
            | CitationReward()
            | ToolCallReward()
        ):
            from rollmill.rewards.text.build import build_text_reward

            return build_text_reward(config, resources)
