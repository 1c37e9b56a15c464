"""Accuracy on held-out tasks: every set of a stage's evaluation, by the weights as they are.

An evaluation may be under way while a training step rolls out: both need the same weights. Its tokens have to be there
before the next update; its rewards may come later.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollmill.buffer import GroupQueue
from rollmill.config.rewards import RewardConfig
from rollmill.config.run import StageConfig
from rollmill.errors import DeadlineError
from rollmill.orchestrator.evaluation_set import SetEvaluator, SetResult, merged_metrics, results_to_json
from rollmill.orchestrator.metrics import require_rewards
from rollmill.rewards import RewardManager
from rollmill.rollout.base import ExplorerSource
from rollmill.types import Experience, Task

BuildRewards = Callable[[Sequence[RewardConfig]], RewardManager]
HeldOut = Mapping[str, Sequence[Task]]
"""Held-out tasks by the name of their set."""


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """What an evaluation came to. `experiences` are the greedy ones of each set, else the sampled ones."""

    sets: list[SetResult]
    experiences: list[Experience]

    @property
    def metrics(self) -> dict[str, float]:
        """eval/... of all sets."""
        return merged_metrics(self.sets)

    def to_json(self, **about: Any) -> Mapping[str, Any]:
        """All numbers, task by task."""
        return results_to_json(self.sets, **about)


class Evaluation:
    """An evaluation under way; it has begun when it is made."""

    def __init__(self, examiners: Sequence[SetEvaluator], deadline_s: float) -> None:
        self._queue, self._deadline_s = GroupQueue(), deadline_s
        self._examiners = [(each, each.start(self._queue)) for each in examiners]

    async def generated(self) -> None:
        """Wait for all tokens: afterwards the weights may change. Raises DeadlineError."""
        await self._in_time(self._queue.wait_all_generated())

    async def result(self) -> EvaluationResult:
        """Wait for all rewards.

        Raises:
            DeadlineError: not finished within the deadline.
            RewardError: a reward failed, or none applies to the held-out tasks.
        """
        try:
            groups = await self._in_time(self._queue.get(len(self._queue), 2 * self._deadline_s))
        except BaseException:
            await self.cancel()
            raise
        results, shown, start = [], [], 0
        for examiner, count in self._examiners:
            own, start = groups[start : start + count], start + count
            where = f"the evaluation of {examiner.name}" if examiner.name else "the evaluation"
            require_rewards([one for group in own for one in group], where)
            found, experiences = examiner.result(own)
            results.append(found)
            shown += experiences
        return EvaluationResult(results, shown)

    async def cancel(self) -> None:
        """Stop what is under way."""
        await self._queue.cancel()

    async def _in_time(self, work: Awaitable[Any]) -> Any:
        try:
            async with asyncio.timeout(self._deadline_s):
                return await work
        except TimeoutError:
            raise DeadlineError(
                "the evaluation",
                f"the explorer on {sum(len(each.tasks) for each, _ in self._examiners)} held-out tasks",
                self._deadline_s,
                "Raise rollout.deadline_s, or lower evaluation.limit or rollout.max_new_tokens.",
            ) from None


class Evaluator:
    """Evaluates the current weights of the explorers' engine on fixed lists of tasks, with the same seeds every time.

    Args:
        config: the stage.
        judge: of the stage's rewards; sets with rewards of their own get another one by `make_judge`.
        explorers: of the stage; sets that are rolled out otherwise get others.
    """

    def __init__(
        self,
        config: StageConfig,
        held_out: HeldOut,
        *,
        judge: RewardManager,
        explorers: ExplorerSource,
        make_judge: BuildRewards,
        seed: int,
    ) -> None:
        assert config.evaluation is not None
        self._deadline_s = config.rollout.deadline_s
        self._judges: list[RewardManager] = []
        self._explorers: list[ExplorerSource] = []
        self.examiners: list[SetEvaluator] = []
        for name, section in config.evaluation.all_sets().items():
            asked, own = config.for_evaluation(section), judge
            if asked.rewards != config.rewards:
                own = make_judge(asked.rewards)
                self._judges.append(own)
            used = explorers
            if own is not judge or (asked.workflow, asked.environment) != (config.workflow, config.environment):
                used = explorers.variant(asked, own)
                self._explorers.append(used)
            self.examiners.append(SetEvaluator(name, used.explorer(), held_out[name], section, asked.rollout, seed))

    def begin(self, names: Sequence[str] | None = None) -> Evaluation:
        """Begin an evaluation by the weights as they are, of the sets of these names or of all."""
        chosen = [each for each in self.examiners if names is None or each.name in names]
        return Evaluation(chosen, self._deadline_s)

    async def evaluate(self, names: Sequence[str] | None = None) -> EvaluationResult:
        """Evaluate, and wait for it. Raises like `Evaluation.result`."""
        return await self.begin(names).result()

    def metrics(self) -> list[dict[str, float]]:
        """What has happened in environments and tools of its own since the last call."""
        return [each.metrics() for each in self._explorers]

    def counters(self) -> list[dict[str, float]]:
        """What rewards of its own count so far."""
        return [each.counters() for each in self._judges]

    async def close(self) -> None:
        """End what only the evaluation needs; may be called twice."""
        for explorers in self._explorers:
            await explorers.close()
        for judge in self._judges:
            judge.close()
