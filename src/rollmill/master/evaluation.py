"""Accuracy on held-out tasks: greedy, and sampled with a Wilson confidence interval."""

from __future__ import annotations

import asyncio

from rollmill.config.rollout import SamplingConfig
from rollmill.config.run import EvaluationConfig
from rollmill.core.errors import DeadlineError
from rollmill.core.types import Experience, Task
from rollmill.engines.native.rng import fold
from rollmill.explorer import Explorer
from rollmill.master.measures import require_rewards
from rollmill.monitor.metrics import wilson_interval

EVALUATION_STREAM = 0xE7A1  # keeps evaluation's randomness apart from training's


class Evaluator:
    """Evaluates the explorer's current weights on a fixed list of tasks, with the same seeds every time."""

    def __init__(
        self, explorer: Explorer, tasks: list[Task], config: EvaluationConfig, sampling: SamplingConfig, seed: int
    ) -> None:
        self._explorer = explorer
        self._tasks = tasks
        self._config = config
        self._sampling = sampling
        self._seed = seed

    async def evaluate(self, deadline_s: float) -> tuple[dict[str, float], list[Experience]]:
        """Metrics eval/greedy, eval/sampled (with _low and _high, 95 %), eval/length; and the greedy experiences
        (sampled ones where there are no greedy ones).

        Raises:
            DeadlineError: not finished within `deadline_s` seconds.
            RewardError: a reward failed, or none applies to the held-out tasks.
        """
        greedy = self._sampling.model_copy(update={"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0})
        try:
            async with asyncio.timeout(deadline_s):
                greedy_runs, sampled_runs = await asyncio.gather(
                    self._runs(greedy, 1 if self._config.greedy else 0, "greedy"),
                    self._runs(self._sampling, self._config.samples, "sampled"),
                )
        except TimeoutError:
            raise DeadlineError(
                "the evaluation",
                f"the explorer on {len(self._tasks)} held-out tasks",
                deadline_s,
                "Raise rollout.deadline_s, or lower evaluation.limit or rollout.max_new_tokens.",
            ) from None
        require_rewards([*greedy_runs, *sampled_runs], "the evaluation")
        metrics: dict[str, float] = {}
        if greedy_runs:
            metrics["eval/greedy"] = self._accuracy(greedy_runs)
        if sampled_runs:
            metrics["eval/sampled"] = self._accuracy(sampled_runs)
            correct = round(metrics["eval/sampled"] * len(sampled_runs))
            metrics["eval/sampled_low"], metrics["eval/sampled_high"] = wilson_interval(correct, len(sampled_runs))
        shown = greedy_runs or sampled_runs
        metrics["eval/length"] = sum(e.action_tokens for e in shown) / len(shown)
        return metrics, shown

    async def _runs(self, sampling: SamplingConfig, n: int, kind: str) -> list[Experience]:
        if n == 0:
            return []
        groups = await asyncio.gather(
            *(
                self._explorer.rollout(
                    task,
                    sampling,
                    n=n,
                    seed=fold(self._seed, EVALUATION_STREAM, index),
                    group=f"eval-{kind}/{task.id}",
                )
                for index, task in enumerate(self._tasks)
            )
        )
        return [experience for group in groups for experience in group]

    def _accuracy(self, experiences: list[Experience]) -> float:
        correct = sum(e.reward is not None and e.reward >= self._config.threshold for e in experiences)
        return correct / len(experiences)
