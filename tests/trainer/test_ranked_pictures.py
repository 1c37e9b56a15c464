"""Ranks whose rows have different pictures, or none: two of them learn what one learns."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
from support.algorithm_batches import flat, options_of, record, trainer_of
from support.picture_models import load_seeing, noise_picture, picture_prompt
from support.rank_processes import RANKS, computed_by_ranks
from torch import Tensor

from rollmill.models.load import PolicyModel
from rollmill.trainer.distributed.ranks import RankGroup, Sharding
from rollmill.types import Experience, ExperienceSource

SEEDS = range(20)
FAMILIES = ["idefics3", "llava", "qwen2_vl", "qwen3_vl"]
FROZEN: list[list[str]] = [["vision"], [], ["vision", "projector"]]
SIZES = [(28, 28), (28, 56), (56, 28), (56, 56), (84, 28)]
ALGORITHMS: list[dict[str, Any]] = [
    {"name": "grpo", "kl": {"coefficient": 0.1}},
    {"name": "ppo", "critic": {"lr": 1e-3}},
]
SHARDINGS: dict[Sharding, range] = {"fsdp": SEEDS, "context": SEEDS[:4], "none": SEEDS[:4]}


def drawn_batch(policy: PolicyModel, seed: int) -> list[Experience]:
    """One to six groups of one to four completions, after a text or one to three pictures of drawn sizes."""
    rng = np.random.default_rng(seed)
    found = []
    for group in range(int(rng.integers(1, 7))):
        sizes = [SIZES[int(rng.integers(len(SIZES)))] for _ in range(int(rng.integers(0, 4)))]
        pictures = [noise_picture(*size, int(rng.integers(1 << 30))) for size in sizes]
        prompt = picture_prompt(policy, "what?", *pictures) if pictures else None
        first = rng.integers(3, 90, int(rng.integers(1, 9))).tolist() if prompt is None else prompt.token_ids
        members = int(rng.integers(1, 5))
        for index in range(members):
            ids = np.array([*first, *rng.integers(3, 90, int(rng.integers(1, 20)))], np.int32)
            mask = np.arange(len(ids)) >= len(first)
            found.append(
                Experience(
                    id=f"{group}-{index}",
                    task_id=str(group),
                    group=str(group),
                    token_ids=ids,
                    action_mask=mask,
                    logprobs=np.zeros(len(ids), np.float32),
                    versions=np.where(mask, 0, -1).astype(np.int32),
                    reward=float(index % 2),
                    source=ExperienceSource.ROLLOUT,
                    pictures=prompt,
                )
            )
    return found


Job = dict[str, Any]
Result = tuple[dict[str, float], dict[str, Tensor]]


def learned(job: Job, ranks: RankGroup) -> Result:
    """Metrics of a step, and how far it moved the weights of policy and critic."""
    trainer = trainer_of(copy.deepcopy(job["model"]), options_of(**job["algorithm"]), ranks=ranks, **job["settings"])
    models = {"policy": trainer.model} | ({"critic": trainer._critic.model} if trainer._critic else {})
    before = {name: flat(model) for name, model in models.items()}
    metrics = trainer.step(job["batch"], 0)
    return metrics, {name: flat(model) - before[name] for name, model in models.items()}


def _of_rank(rank: int, jobs: dict[int, Job]) -> dict[Any, Result]:
    return {
        (seed, sharding): learned(jobs[seed], RankGroup(rank, RANKS, sharding))
        for sharding, seeds in SHARDINGS.items()
        for seed in seeds
    }


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[int, Result], list[dict[Any, Result]]]:
    """Of one rank by seed, and of each of two by seed and sharding."""
    folder = tmp_path_factory.mktemp("ranks")
    policies = {family: load_seeing(folder / family, family) for family in FAMILIES}
    jobs = {}
    for seed in SEEDS:
        policy = policies[FAMILIES[seed % len(FAMILIES)]]
        batch = drawn_batch(policy, seed)
        record(policy.model, batch, 0.2)
        settings = {"micro_batch_tokens": 60 + 40 * (seed % 3), "eps": 1e-4, "freeze": FROZEN[seed // 4 % 3]}
        jobs[seed] = {
            "model": policy.model,
            "batch": batch,
            "algorithm": ALGORITHMS[seed % 5 == 0],
            "settings": settings | {"gradient_checkpointing": seed % 3 == 0},
        }
    pair = computed_by_ranks(_of_rank, jobs, folder)
    alone = {seed: learned(job, RankGroup()) for seed, job in jobs.items()}
    return alone, pair


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("sharding", SHARDINGS)
def test_two_ranks_learn_from_any_pictures_what_one_learns(results: Any, sharding: Sharding) -> None:
    alone, pair = results
    for seed in SHARDINGS[sharding]:
        metrics, moved = alone[seed]
        for each in pair:
            got, own = each[seed, sharding]
            assert got == pytest.approx(metrics, rel=1e-4, abs=1e-4), seed
            for name, movement in moved.items():
                assert (own[name] - movement).norm() <= 1e-4 * movement.norm(), (seed, name)
