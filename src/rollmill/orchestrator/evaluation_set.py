"""One set of held-out tasks: rolled out by the weights as they are, and measured."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from zlib import crc32

from rollmill.buffer import GroupQueue
from rollmill.config.evaluation import EvaluationSet, evaluation_metric_name
from rollmill.config.rollout import SamplingConfig
from rollmill.rewards.answers.extraction import normalize_vote
from rollmill.rollout.base import RolloutGenerator
from rollmill.rollout.served_model import COMPLETION_TOKENS_KEY
from rollmill.seeds import derive_seed
from rollmill.trackers.estimators import IntervalEstimate, maj_at_k, mean_over_tasks, pass_at_k
from rollmill.types import Experience, Task

EVALUATION_STREAM = 0xE7A1  # keeps evaluation's randomness apart from training's


@dataclass(frozen=True, slots=True)
class Attempt:
    """One rollout of a held-out task."""

    reward: float | None
    tokens: int  #: that the policy wrote
    vote: str | None = None


@dataclass(frozen=True, slots=True)
class TaskResult:
    """What came of one task."""

    id: str
    greedy: list[Attempt]
    sampled: list[Attempt]


class SetResult:
    """What came of a set. `tasks` are in the order of the set."""

    def __init__(self, name: str, section: EvaluationSet, tasks: Sequence[TaskResult]) -> None:
        self.name, self.tasks = name, list(tasks)
        self._section = section

    def estimates(self) -> dict[str, IntervalEstimate]:
        """Accuracies by what they are called, without the set's name: sampled, greedy, pass@K, mean@N, maj@K."""
        section, values = self._section, self.by_task()
        return {what: mean_over_tasks(each, max(section.samples, 1)) for what, each in values.items()}

    def by_task(self) -> dict[str, list[float]]:
        """The same of every task."""
        section, found = self._section, {}
        if section.greedy:
            found["greedy"] = [float(self._correct(task.greedy)) for task in self.tasks]
        if (n := section.samples) > 0:
            counts = [self._correct(task.sampled) for task in self.tasks]
            found["sampled"] = [count / n for count in counts]
            if section.k:
                found[f"mean@{n}"] = found["sampled"]
            for k in section.k:
                found[f"pass@{k}"] = [pass_at_k(n, count, k) for count in counts]
                if section.answer is not None:
                    found[f"maj@{k}"] = [maj_at_k(self._votes(task.sampled), k) for task in self.tasks]
        return found

    def metrics(self) -> dict[str, float]:
        """Numbers by their whole names."""
        found: dict[str, float] = {}
        for what, each in self.estimates().items():
            found[evaluation_metric_name(self.name, what)] = each.value
            if what != "greedy":
                found |= {
                    evaluation_metric_name(self.name, f"{what}_low"): each.low,
                    evaluation_metric_name(self.name, f"{what}_high"): each.high,
                }
        shown = [attempt for task in self.tasks for attempt in (task.greedy or task.sampled)]
        found[evaluation_metric_name(self.name, "length")] = sum(each.tokens for each in shown) / len(shown)
        drawn = [attempt.reward for task in self.tasks for attempt in (task.sampled or task.greedy)]
        judged = [reward for reward in drawn if reward is not None]
        if judged:
            found[evaluation_metric_name(self.name, "reward")] = sum(judged) / len(judged)
        return found

    def to_json(self) -> dict[str, Any]:
        """All of it, task by task."""
        section = self._section
        voted = section.answer is not None and bool(section.k)
        rows = []
        for task in self.tasks:
            row: dict[str, Any] = {"id": task.id}
            if section.greedy:
                row |= {"greedy": _column(task.greedy, "reward"), "greedy_tokens": _column(task.greedy, "tokens")}
            if section.samples:
                row |= {"rewards": _column(task.sampled, "reward"), "tokens": _column(task.sampled, "tokens")}
                row["correct"] = self._correct(task.sampled)
            rows.append(row | ({"votes": _column(task.sampled, "vote")} if voted else {}))
        settings = section.model_dump(mode="json", include={"samples", "greedy", "threshold", "k", "answer"})
        return {"name": self.name, **settings, "tasks": rows}

    @classmethod
    def from_json(cls, section: EvaluationSet, data: Mapping[str, Any]) -> SetResult:
        """Inverse of `to_json`."""
        return cls(
            data["name"],
            section,
            [
                TaskResult(
                    row["id"],
                    _attempts(row.get("greedy", []), row.get("greedy_tokens", []), None),
                    _attempts(row.get("rewards", []), row.get("tokens", []), row.get("votes")),
                )
                for row in data["tasks"]
            ],
        )

    def _correct(self, attempts: Sequence[Attempt]) -> int:
        return sum(self._is_correct(each) for each in attempts)

    def _is_correct(self, attempt: Attempt) -> bool:
        return attempt.reward is not None and attempt.reward >= self._section.threshold

    def _votes(self, attempts: Sequence[Attempt]) -> list[tuple[str | None, bool]]:
        return [(each.vote, self._is_correct(each)) for each in attempts]


def _column(attempts: Sequence[Attempt], key: str) -> list[Any]:
    return [getattr(each, key) for each in attempts]


def _attempts(
    rewards: Sequence[float | None], tokens: Sequence[int], votes: Sequence[str | None] | None
) -> list[Attempt]:
    votes = votes or [None] * len(rewards)
    return [Attempt(*each) for each in zip(rewards, tokens, votes, strict=True)]


class SetEvaluator:
    """Rolls out one set of held-out tasks, with the same seeds every time."""

    def __init__(
        self,
        name: str,
        explorer: RolloutGenerator,
        tasks: Sequence[Task],
        section: EvaluationSet,
        sampling: SamplingConfig,
        seed: int,
    ) -> None:
        self.name, self.tasks, self._section = name, list(tasks), section
        self._explorer, self._sampling = explorer, sampling
        self._seed = (seed, EVALUATION_STREAM, crc32(name.encode())) if name else (seed, EVALUATION_STREAM)

    def start(self, queue: GroupQueue) -> int:
        """Put the groups of all tasks into the queue, greedy ones first; how many."""
        greedy = self._sampling.model_copy(update={"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0})
        for sampling, n, kind in self._kinds(greedy):
            for index, task in enumerate(self.tasks):
                group = f"eval-{self.name}-{kind}/{task.id}" if self.name else f"eval-{kind}/{task.id}"
                self._start(queue, task, sampling, n, derive_seed(*self._seed, index), group)
        return len(self._kinds(greedy)) * len(self.tasks)

    def result(self, groups: Sequence[Sequence[Experience]]) -> tuple[SetResult, list[Experience]]:
        """What the groups came to; and the experiences to look at: the greedy ones, else the sampled ones."""
        section, count = self._section, len(self.tasks)
        greedy = groups[:count] if section.greedy else [[]] * count
        sampled = groups[len(groups) - count :] if section.samples else [[]] * count
        tasks = [
            TaskResult(task.id, self._attempts(own, int(section.greedy)), self._attempts(drawn, section.samples))
            for task, own, drawn in zip(self.tasks, greedy, sampled, strict=True)
        ]
        shown = greedy if section.greedy else sampled
        return SetResult(self.name, section, tasks), [each for group in shown for each in group]

    def _kinds(self, greedy: SamplingConfig) -> list[tuple[SamplingConfig, int, str]]:
        kinds = [(greedy, int(self._section.greedy), "greedy"), (self._sampling, self._section.samples, "sampled")]
        return [each for each in kinds if each[1]]

    def _start(self, queue: GroupQueue, task: Task, sampling: SamplingConfig, n: int, seed: int, group: str) -> None:
        number = len(queue)

        def generated(experiences: list[Experience]) -> None:
            queue.generated(number, experiences)

        work = self._explorer.rollout(task, sampling, n=n, seed=seed, group=group, generated=generated)
        queue.put(number, f"held-out task {task.id}", asyncio.ensure_future(work))

    def _attempts(self, group: Sequence[Experience], n: int) -> list[Attempt]:
        """The n rollouts of a group. One that left no experience earned nothing."""
        rollouts: dict[str, list[Experience]] = {}
        for each in group:
            rollouts.setdefault(each.info.get("episode", each.id), []).append(each)
        place = self._section.answer if self._section.k else None
        made = [
            Attempt(
                each[-1].reward,
                sum(one.info.get(COMPLETION_TOKENS_KEY, one.action_tokens) for one in each),
                None if place is None else normalize_vote(each[-1].response, place),
            )
            for each in rollouts.values()
        ]
        return made + [Attempt(None, 0)] * (n - len(made))


def merged_metrics(results: Sequence[SetResult]) -> dict[str, float]:
    """The numbers of all sets."""
    return {key: value for each in results for key, value in each.metrics().items()}


def results_to_json(results: Sequence[SetResult], **about: Any) -> Mapping[str, Any]:
    """What is stored of an evaluation."""
    return {**about, "metrics": merged_metrics(results), "sets": [each.to_json() for each in results]}
