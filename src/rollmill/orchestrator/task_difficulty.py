"""Scores the difficulty of tasks before a run: by a policy's success rate, or by an LLM judge that sees the prompts."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rollmill.config.loader import LoadedRun
from rollmill.config.rollout import SamplingConfig
from rollmill.config.run import StageConfig
from rollmill.data import load_taskset
from rollmill.data.score_file import ScoreFile
from rollmill.errors import ConfigError, DeadlineError
from rollmill.models.cpu.step_timing import StepSize, choose_precision
from rollmill.models.load import PolicyModel
from rollmill.orchestrator.components import build_stage_rewards
from rollmill.orchestrator.rollouts import LocalRollouts
from rollmill.orchestrator.setup import choose_device
from rollmill.orchestrator.task_selection import select_tasks
from rollmill.rewards.judges.base import LLMJudge
from rollmill.rewards.judges.difficulty import DifficultyJudge
from rollmill.rewards.resources import RewardResources
from rollmill.seeds import derive_seed
from rollmill.trainer.parity import load_verified_policy
from rollmill.types import Task, most_varied_rewards
from rollmill.waiting import patient_timeout

SCORING_STREAM = 0x5C04
_AT_ONCE = 64

Rating = dict[str, Any]
Progress = Callable[[int, int], None]
"""Called with the number of rated tasks and of all tasks."""


@dataclass(slots=True)
class DifficultyScores:
    """Counts of a scoring: tasks in the taskset, tasks rated in the file, and ids of tasks without a verdict."""

    tasks: int
    rated: int
    without: list[str]


class ScoreProgress:
    """Writes ratings, wave by wave, and reports progress."""

    def __init__(self, file: ScoreFile, tasks: int, rated: int, progress: Progress) -> None:
        self._file, self._progress = file, progress
        self._found = DifficultyScores(tasks, rated, [])

    def add(self, ratings: Sequence[tuple[Task, Rating | None]]) -> None:
        """Add the ratings of a wave; None: no verdict on the task."""
        rated = [(task, rating) for task, rating in ratings if rating is not None]
        self._file.add(rated)
        self._found.without.extend(task.id for task, rating in ratings if rating is None)
        self._found.rated += len(rated)
        self._progress(self._found.rated, self._found.tasks)

    def scored(self) -> DifficultyScores:
        """The counts so far."""
        return self._found


def find_stage(loaded: LoadedRun, name: str | None) -> StageConfig:
    """The stage of that name; without one the first that rolls out, else the first. Raises ConfigError."""
    if name is None:
        return next((stage for stage in loaded.stages if stage.algorithm.uses_rollouts), loaded.stages[0])
    found = [stage for stage in loaded.stages if stage.name == name]
    if not found:
        raise ConfigError(f"no stage `{name}` in {loaded.path}; it has {', '.join(one.name for one in loaded.stages)}")
    return found[0]


def score_by_policy(
    loaded: LoadedRun, stage: StageConfig, out: Path, samples: int, progress: Progress
) -> DifficultyScores:
    """Roll out `samples` completions of every task with the run's model, sampling and rewards.

    A completion is a success if its reward is at least `evaluation.threshold`, or 1 without an evaluation.

    Raises:
        ConfigError: the model is a new one, there are no rewards, or `out` cannot be continued.
        DeadlineError: a wave of completions took longer than rollout.deadline_s.
    """
    if loaded.config.model.path == "new":
        raise ConfigError(
            "model.path is `new`, and a model without training solves nothing; name the checkpoint that the run starts "
            "from: --set model.path=DIR"
        )
    if not all(view.rewards for view in stage.by_domain().values()):
        raise ConfigError(f"stage {stage.name} has no rewards, so nothing tells success from failure; add `rewards`")
    threshold = success_threshold(stage)
    file = ScoreFile(out, _describe_scoring(loaded, stage, samples, threshold))
    torch.set_num_threads(1 if loaded.config.threads == "auto" else loaded.config.threads)
    device = choose_device(loaded.config.device)
    model, seed = loaded.config.model, loaded.config.seed
    policy = load_verified_policy(model, texts=[], seed=seed, device=device, pictures=True)
    alone = stage.model_copy(update={"evaluation": None})
    tasks = select_tasks(alone, policy, load_taskset(stage.required_taskset), {}).training.tasks
    todo = [(number, task) for number, task in enumerate(tasks) if not file.has(task)]
    tally = ScoreProgress(file, len(tasks), len(tasks) - len(todo), progress)
    asyncio.run(_roll_out(loaded, stage, policy, todo, samples, threshold, tally))
    return tally.scored()


def success_threshold(stage: StageConfig) -> float:
    """The lowest reward of a success."""
    return 1.0 if stage.evaluation is None else stage.evaluation.threshold


def _describe_scoring(loaded: LoadedRun, stage: StageConfig, samples: int, threshold: float) -> dict[str, Any]:
    """Everything that a policy's success rates depend on."""
    by = {"by": "policy", "model": str(loaded.config.model.path), "samples": samples}
    return {**by, "threshold": threshold, "seed": loaded.config.seed, **scoring_settings(stage)}


def scoring_settings(stage: StageConfig) -> dict[str, Any]:
    """The part that success rates depend on for any model."""
    views = stage.by_domain()
    rewards = json.dumps([each.model_dump(mode="json") for view in views.values() for each in view.rewards])
    sampling = {
        name: view.rollout.model_dump(mode="json", include=set(SamplingConfig.model_fields))
        for name, view in views.items()
    }
    return {
        "rewards": hashlib.sha256(rewards.encode()).hexdigest()[:8],
        **(sampling if stage.domains else sampling[""]),
    }


def score_by_judge(stage: StageConfig, judge: LLMJudge | None, out: Path, progress: Progress) -> DifficultyScores:
    """Have an LLM judge rate the difficulty of every prompt: `judge`, or the first judge among the stage's rewards.

    Raises:
        ConfigError: there is no judge, or `out` cannot be continued.
        RewardError: the judge cannot be reached.
    """
    judges = [judge] if judge is not None else [each for each in stage.rewards if isinstance(each, LLMJudge)]
    if not judges:
        raise ConfigError(
            f"stage {stage.name} has no reward that asks a language model; give --endpoint and --model, or add one"
        )
    config = judges[0]
    model = config.model if config.path is None else str(config.path)
    file = ScoreFile(out, {"by": "judge", "model": model, "votes": config.votes, "temperature": config.temperature})
    tasks = load_taskset(stage.required_taskset).tasks
    todo = [task for task in tasks if not file.has(task)]
    resources = RewardResources(stage.reward_settings.workers)
    try:
        rater = DifficultyJudge(config, resources)
        tally = ScoreProgress(file, len(tasks), len(tasks) - len(todo), progress)
        asyncio.run(_rate(rater, todo, tally))
    finally:
        resources.close()
    return tally.scored()


async def _rate(rater: DifficultyJudge, tasks: Sequence[Task], tally: ScoreProgress) -> None:
    for start in range(0, len(tasks), _AT_ONCE):
        wave = tasks[start : start + _AT_ONCE]
        found = await asyncio.gather(*(rater.rate(task) for task in wave))
        ratings = [None if value is None else {"difficulty": value} for value in found]
        tally.add(list(zip(wave, ratings, strict=True)))


async def in_waves(
    tasks: Sequence[tuple[int, Task]],
    size: int,
    rate: Callable[[int, Task], Awaitable[Rating | None]],
    deadline_s: float,
    tally: ScoreProgress,
) -> None:
    """Rate `size` tasks at a time. Raises DeadlineError if a wave takes too long."""
    for start in range(0, len(tasks), size):
        wave = tasks[start : start + size]
        try:
            async with patient_timeout(deadline_s):
                found = await asyncio.gather(*(rate(number, task) for number, task in wave))
        except TimeoutError:
            advice = "Raise rollout.deadline_s, or lower --samples or rollout.max_new_tokens."
            raise DeadlineError("scoring", f"{len(wave)} tasks' completions", deadline_s, advice) from None
        tally.add([(task, each) for (_, task), each in zip(wave, found, strict=True)])


async def _roll_out(
    loaded: LoadedRun,
    stage: StageConfig,
    policy: PolicyModel,
    tasks: Sequence[tuple[int, Task]],
    samples: int,
    threshold: float,
    tally: ScoreProgress,
) -> None:
    rollout, seed = stage.rollout, loaded.config.seed
    precision = stage.trainer.precision
    if precision == "auto":
        precision = choose_precision(policy.model, policy.device, StepSize.of_generation())
    rewards = build_stage_rewards(stage, policy)
    known = [task for _, task in tasks]
    explorers = LocalRollouts(stage, policy, rewards, precision=precision, tasks=known, trained_on=False)
    explorers.publish(0)
    explorer = explorers.explorer()
    size = max(1, rollout.max_sequences // samples)

    async def rating(number: int, task: Task) -> Rating | None:
        stream = derive_seed(seed, SCORING_STREAM, number)
        sampling = stage.view_of(task.taskset).rollout
        group = await explorer.rollout(task, sampling, n=samples, seed=stream, group=f"score/{task.id}")
        values = most_varied_rewards(group)
        if not values:
            return None
        rate = sum(reward >= threshold for reward in values) / len(values)
        return {"success_rate": rate, "difficulty": 1 - rate, "mean_reward": sum(values) / len(values)}

    try:
        await in_waves(tasks, size, rating, rollout.deadline_s, tally)
    finally:
        await explorers.close()
        rewards.close()
