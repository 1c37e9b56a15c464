"""Evaluates the current weights on every set of held-out tasks of a stage.

An evaluation may run while a training step rolls out, as both need the same weights. Its completions must be finished
before the next update; its rewards may come later.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rollmill.buffer import GroupQueue
from rollmill.config.run import StageConfig
from rollmill.data import Sampler
from rollmill.errors import DeadlineError
from rollmill.orchestrator.domain_pauses import unless_lost
from rollmill.orchestrator.evaluation_set import RolloutGuard, SetEvaluator, SetResult, merged_metrics, results_to_json
from rollmill.orchestrator.metrics import require_rewards
from rollmill.rewards import RewardManager
from rollmill.rewards.stage_rewards import StageRewards
from rollmill.rollout.base import RolloutGenerator
from rollmill.types import Experience, Task
from rollmill.waiting import patient_timeout

BuildRewards = Callable[[StageConfig], RewardManager]
"""Builds the rewards of a stage without domains."""
BuildExplorer = Callable[[StageConfig | None, StageRewards], RolloutGenerator]
"""Builds the explorer of held-out tasks with another workflow, environment or rewards than the stage."""
HeldOut = Mapping[str, Sequence[Task]]
"""Held-out tasks by the name of their set."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """Results of an evaluation. `experiences` are the greedy ones of each set, else the sampled ones."""

    sets: list[SetResult]
    experiences: list[Experience]

    @property
    def metrics(self) -> dict[str, float]:
        """eval/... metrics of all sets."""
        return merged_metrics(self.sets)

    def to_json(self, **about: Any) -> Mapping[str, Any]:
        """All numbers, task by task."""
        return results_to_json(self.sets, **about)


class DomainGuard:
    """Leaves the sets of a domain out of an evaluation when the domain loses a service and is paused.

    Args:
        stage: the stage as the set sees it.
        patience_s: seconds without an answer after which an endpoint counts as lost.
    """

    def __init__(self, domain: str, stage: StageConfig, sampler: Sampler, patience_s: float) -> None:
        self.domain, self._stage, self._sampler, self._patience_s = domain, stage, sampler, patience_s

    async def run(self, lost: set[str], name: str, work: Coroutine[Any, Any, list[Experience]]) -> list[Experience]:
        """Roll out a group of the set `name`, which is added to `lost` if the domain is paused."""
        found = await unless_lost(self.domain, work, self._stage, self._sampler, self._patience_s)
        if found is None:
            lost.add(name)
        return found or []


class Evaluation:
    """A running evaluation; it starts on construction.

    Args:
        guards: of sets that may be left out, by their name.
    """

    def __init__(
        self, set_evaluators: Sequence[SetEvaluator], deadline_s: float, guards: Mapping[str, DomainGuard]
    ) -> None:
        self._queue, self._deadline_s, self._guards = GroupQueue(), deadline_s, guards
        self.is_generating = True  #: nobody has waited for its completions yet
        self._lost: set[str] = set()
        self._set_evaluators = [(each, each.start(self._queue, self._guard(each.name))) for each in set_evaluators]

    def _guard(self, name: str) -> RolloutGuard | None:
        guard = self._guards.get(name)
        return None if guard is None else partial(guard.run, self._lost, name)

    async def generated(self) -> None:
        """Wait for all completions: afterwards the weights may change. Raises DeadlineError."""
        await self._in_time(self._queue.wait_all_generated())
        self.is_generating = False

    async def result(self) -> EvaluationResult:
        """Wait for all rewards. A set whose domain has been paused meanwhile is left out, with a warning.

        Raises:
            DeadlineError: not finished within the deadline.
            RewardError: a reward failed, or none applies to the held-out tasks.
        """
        try:
            groups = await self._in_time(self._queue.get(len(self._queue), 2 * self._deadline_s))
        except BaseException:
            await self.cancel()
            raise
        self.is_generating = False
        results, shown, start = [], [], 0
        for evaluator, count in self._set_evaluators:
            own, start = groups[start : start + count], start + count
            if evaluator.name in self._lost:
                domain = self._guards[evaluator.name].domain
                text = "the evaluation of %s is left out this time, as domain %s is paused"
                _log.warning(text, evaluator.name, domain)
                continue
            where = f"the evaluation of {evaluator.name}" if evaluator.name else "the evaluation"
            require_rewards([one for group in own for one in group], where)
            found, experiences = evaluator.result(own)
            results.append(found)
            shown += experiences
        return EvaluationResult(results, shown)

    async def cancel(self) -> None:
        self.is_generating = False
        await self._queue.cancel()

    async def _in_time(self, work: Awaitable[Any]) -> Any:
        try:
            async with patient_timeout(self._deadline_s):
                return await work
        except TimeoutError:
            raise DeadlineError(
                "the evaluation",
                f"the explorer on {sum(len(each.tasks) for each, _ in self._set_evaluators)} held-out tasks",
                self._deadline_s,
                "Raise rollout.deadline_s, or lower evaluation.limit or rollout.max_new_tokens.",
            ) from None


class Evaluator:
    """Evaluates the current weights on fixed lists of tasks, with the same seeds every time.

    Args:
        config: the stage.
        rewards: the stage's rewards; sets with other rewards get theirs from `build_rewards`.
        build_explorer: called with None for the stage's own explorer.
        sampler: pauses domains that lose a service; None if there are none to pause.
    """

    def __init__(
        self,
        config: StageConfig,
        held_out: HeldOut,
        *,
        rewards: StageRewards,
        build_explorer: BuildExplorer,
        build_rewards: BuildRewards,
        seed: int,
        sampler: Sampler | None = None,
    ) -> None:
        assert config.evaluation is not None
        rollout = config.rollout
        self._deadline_s, self._batch = rollout.deadline_s, rollout.batch * rollout.group_size
        self._rewards: list[StageRewards] = []
        self.set_evaluators: list[SetEvaluator] = []
        self._guards: dict[str, DomainGuard] = {}
        self._newest: Evaluation | None = None
        for name, section in config.evaluation.all_sets().items():
            stage, used_rewards = config.for_evaluation(section), rewards
            plain = stage.model_copy(update={"domains": {}})
            if section.domain is not None and section.rewards is None:
                used_rewards = StageRewards({"": rewards.by_domain[section.domain]})
            elif stage.rewards != config.rewards or config.domains:
                used_rewards = StageRewards.build(plain, build_rewards)
                self._rewards.append(used_rewards)
            same = (stage.workflow, stage.environment) == (config.workflow, config.environment)
            if used_rewards is rewards and same:
                explorer = build_explorer(None, rewards)
            else:
                explorer = build_explorer(plain, used_rewards)
            evaluator = SetEvaluator(name, explorer, held_out[name], section, stage.rollout, seed)
            self.set_evaluators.append(evaluator)
            if section.domain is not None and sampler is not None:
                self._guards[name] = DomainGuard(section.domain, stage, sampler, config.mixing.lost_after_s)

    def begin(self, names: Sequence[str] | None = None, *, is_complete: bool = False) -> Evaluation:
        """Start an evaluation of the current weights, on the sets of these names or on all. It has
        `rollout.deadline_s` for each batch's worth of completions.

        Args:
            is_complete: no set may be left out; what its domain loses is an error.
        """
        chosen = [each for each in self.set_evaluators if names is None or each.name in names]
        batches = max(1.0, sum(each.completions for each in chosen) / self._batch)
        self._newest = Evaluation(chosen, batches * self._deadline_s, {} if is_complete else self._guards)
        return self._newest

    @property
    def is_generating(self) -> bool:
        """True while the completions of an evaluation may still be missing."""
        return self._newest is not None and self._newest.is_generating

    async def evaluate(self, names: Sequence[str] | None = None, *, is_complete: bool = False) -> EvaluationResult:
        """Evaluate and return the result; see `begin`. Raises like `Evaluation.result`."""
        return await self.begin(names, is_complete=is_complete).result()

    def counters(self) -> list[dict[str, float]]:
        """Counts of the evaluation's own rewards so far."""
        return [each.counters() for each in self._rewards]

    def close(self) -> None:
        """Close the evaluation's own rewards; may be called twice."""
        for rewards in self._rewards:
            rewards.close()
