"""Two data-parallel processes learn exactly what one learns."""

from __future__ import annotations

import os
import pickle
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from algorithm_batches import batch_for, flat, options_of, record, trainer_of
from torch import Tensor

from rollmill.trainer import ScoreTrainer, Trainer
from rollmill.trainer.ranks import Ranks

ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {"aggregation": "token-mean", "kl": {"coefficient": 0.1, "target": 0.01, "horizon": 20}},
    "dr_grpo": {},
    "gspo": {},
    "mix": {"mu": 0.3},
    "sft": {},
    "distill": {"divergence": "jsd"},
    "ppo": {"advantage": {"lam": 0.9}, "critic": {"lr": 1e-3}},
    "dpo": {"sft": 0.2},
    "reward_model": {"margin": 0.2, "centre_coefficient": 0.1},
}
DTYPES = {"fp32": torch.float32, "float64": torch.float64}
BOUNDS = {"fp32": 1e-5, "float64": 1e-10}
RANKS, DEADLINE_S = 2, 200
CONFIG: dict[str, Any] = {"updates_per_batch": 2, "micro_batch_tokens": 30, "eps": 1e-4}


def _cut(name: str, dtype: str) -> bool:
    """Whether the models of a job are cut into shards, too."""
    return (dtype == "fp32" and name in ("grpo", "mix", "distill")) or (dtype == "float64" and name in ("ppo", "sft"))


JOBS = [(name, dtype) for name in ALGORITHMS for dtype in DTYPES]
CASES = [(*job, False) for job in JOBS] + [(*job, True) for job in JOBS if _cut(*job)]

Result = tuple[list[dict[str, float]], dict[str, Tensor]]


def _learn(job: dict[str, Any], ranks: Ranks | None = None) -> Result:
    """Metrics of each step, and how far all of them moved each model's weights."""
    trainer = trainer_of(job["model"], job["options"], reference=job["reference"], ranks=ranks, **CONFIG)
    models = _models(trainer)
    before = {name: flat(model) for name, model in models.items()}
    metrics = [trainer.step(batch, 1) for batch in job["batches"]]
    return metrics, {name: flat(model) - before[name] for name, model in models.items()}


def _models(trainer: Trainer | ScoreTrainer) -> dict[str, Any]:
    if isinstance(trainer, ScoreTrainer):
        return {"score": trainer.model}
    return {"policy": trainer.model} | ({"critic": trainer._critic.model} if trainer._critic else {})


def _process(rank: int, folder: Path) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
    torch.set_num_threads(1)
    with _group(rank, folder):
        results = {}
        for sharded in (False, True):
            ranks = Ranks(rank, RANKS, sharded)
            jobs = pickle.loads((folder / "jobs").read_bytes())
            results |= {(*key, sharded): _learn(job, ranks) for key, job in jobs.items() if not sharded or _cut(*key)}
    (folder / f"results-{rank}").write_bytes(pickle.dumps(results))


@contextmanager
def _group(rank: int, folder: Path) -> Iterator[None]:
    method, timeout = f"file://{folder / 'rendezvous'}", timedelta(seconds=DEADLINE_S)
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=RANKS, timeout=timeout)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _spawned(folder: Path, jobs: dict[Any, Any]) -> list[dict[Any, Result]]:
    (folder / "jobs").write_bytes(pickle.dumps(jobs))
    running = torch.multiprocessing.spawn(_process, (folder,), nprocs=RANKS, join=False)
    end = time.monotonic() + DEADLINE_S
    try:
        while not running.join(timeout=max(end - time.monotonic(), 0)):  # returns at the end of each process, too
            assert time.monotonic() < end, f"the processes did not end within {DEADLINE_S} s"
    finally:
        for process in running.processes:
            process.kill()
    return [pickle.loads((folder / f"results-{rank}").read_bytes()) for rank in range(RANKS)]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, toy: Any, make_batch: Any) -> tuple[Any, list[Any]]:
    """Of one process and of each of two, by algorithm and type."""
    jobs = {}
    for name, keys in ALGORITHMS.items():
        for dtype in DTYPES:
            options = options_of(name, **keys)
            model, reference = (toy("qwen3", seed=seed).to(DTYPES[dtype]) for seed in (0, 5))
            steps = [batch_for(make_batch, options, seed) for seed in (0, 1)]
            if options.uses_pairs:  # one row: nothing is left for the second process
                steps.append([e for e in steps[1] if e.group == "g0"])
            for batch in steps:
                record(model, batch, 3e-4 if name == "gspo" else 0.2)
            jobs[name, dtype] = {"model": model, "reference": reference, "options": options, "batches": steps}
    pair = _spawned(tmp_path_factory.mktemp("ranks"), jobs)
    return {key: _learn(job) for key, job in jobs.items()}, pair


@pytest.mark.parametrize(("name", "dtype", "sharded"), CASES)
def test_two_processes_learn_what_one_learns(results: Any, name: str, dtype: str, sharded: bool) -> None:
    alone, pair = results
    metrics, moved = alone[name, dtype]
    assert moved.keys() == {"ppo": {"policy", "critic"}, "reward_model": {"score"}}.get(name, {"policy"})
    for each in pair:
        for got, expected in zip(each[name, dtype, sharded][0], metrics, strict=True):
            assert got == pytest.approx(expected, rel=BOUNDS[dtype], abs=BOUNDS[dtype])
        for model, movement in moved.items():
            off = (each[name, dtype, sharded][1][model] - movement).norm() / movement.norm()
            assert off < BOUNDS[dtype]
    for model in moved:
        assert torch.equal(pair[0][name, dtype, sharded][1][model], pair[1][name, dtype, sharded][1][model])
