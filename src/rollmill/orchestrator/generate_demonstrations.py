"""Has a served model answer tasks; its successes become demonstrations for `sft` and others."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

from rollmill.config.loader import LoadedRun, load_served_model
from rollmill.config.run import StageConfig
from rollmill.data import load_taskset
from rollmill.data.score_file import ScoreFile
from rollmill.errors import ConfigError
from rollmill.orchestrator.setup import choose_device
from rollmill.orchestrator.task_difficulty import (
    DifficultyScores,
    Progress,
    Rating,
    ScoreProgress,
    in_waves,
    scoring_settings,
    success_threshold,
)
from rollmill.rewards import build_reward_manager
from rollmill.rewards.stage_rewards import StageRewards
from rollmill.rollout.auxiliary_models import connect_endpoint
from rollmill.rollout.served_model import ServedExplorer, ServedModel, check_endpoint_support
from rollmill.seeds import derive_seed
from rollmill.types import Experience, Task

DEMONSTRATION_STREAM = 0xA25E


def generate_demonstrations(
    loaded: LoadedRun, stage: StageConfig, served: Path, out: Path, samples: int, progress: Progress
) -> tuple[DifficultyScores, int]:
    """Have the model that the file `served` describes answer every task `samples` times, with the stage's sampling.

    Each row of `out` is a task with `success_rate` and, as `response`, the best successful answer, or null. Tasks
    already in `out` are skipped. Returns the scores, and how many tasks are solved.

    Raises:
        ConfigError: there are no rewards, the endpoint does not support the stage, or `out` cannot be continued.
        RewardError: the server answers nothing.
        DeadlineError: a wave of answers took longer than rollout.deadline_s.
    """
    if not all(view.rewards for view in stage.by_domain().values()):
        raise ConfigError(f"stage {stage.name} has no rewards, so nothing tells success from failure; add `rewards`")
    check_endpoint_support(stage, str(served))
    section = load_served_model(served)
    how = {"by": section.model, "samples": samples, "threshold": success_threshold(stage), "seed": loaded.config.seed}
    file = ScoreFile(out, how | scoring_settings(stage))
    tasks = load_taskset(stage.required_taskset).tasks
    todo = [(number, task) for number, task in enumerate(tasks) if not file.has(task)]
    tally = ScoreProgress(file, len(tasks), len(tasks) - len(todo), progress)
    device = str(choose_device(loaded.config.device))
    rewards = StageRewards.build(
        stage, lambda view: build_reward_manager(view.rewards, view.reward_settings, device=device)
    )
    model = ServedModel(str(served), connect_endpoint(str(served), section), completes=section.completes)
    explorer = ServedExplorer(model, rewards)

    async def rating(number: int, task: Task) -> Rating | None:
        seed = derive_seed(loaded.config.seed, DEMONSTRATION_STREAM, number)
        sampling = stage.view_of(task.taskset).rollout
        group = await explorer.rollout(task, sampling, n=samples, seed=seed, group=f"answer/{task.id}")
        judged = [each for each in group if each.reward is not None]
        if not judged:
            return None
        solved = [each for each in judged if _reward(each) >= success_threshold(stage)]
        return {"success_rate": len(solved) / len(judged), "response": _best(solved)}

    at_once = max(1, section.max_in_flight // samples)
    try:
        asyncio.run(in_waves(todo, at_once, rating, stage.rollout.deadline_s, tally))
    finally:
        model.close()
        rewards.close()
    return tally.scored(), sum(json.loads(line)["response"] is not None for line in out.read_text().splitlines())


def _best(solved: Sequence[Experience]) -> str | None:
    """The answer with the highest reward; among equals the shortest."""
    best = min(solved, key=lambda each: (-_reward(each), len(each.response)), default=None)
    return None if best is None else best.response


def _reward(experience: Experience) -> float:
    assert experience.reward is not None
    return experience.reward
