"""Two data-parallel processes learn exactly what one learns."""

from __future__ import annotations

import pickle
from typing import Any, get_args

import pytest
import torch
from support.algorithm_batches import batch_for, flat, options_of, record, trainer_of
from support.rank_processes import RANKS, computed_by_ranks
from torch import Tensor

from rollmill.errors import TrainingError
from rollmill.trainer import RewardTrainer, Trainer
from rollmill.trainer.batch import MicroBatch
from rollmill.trainer.distributed.ranks import RankGroup, Sharding
from rollmill.trainer.update import MiniBatch, PolicyUpdater

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {"aggregation": "token-mean", "kl": {"coefficient": 0.1, "target": 0.01, "horizon": 20}},
    "dr_grpo": {},
    "gspo": {},
    "mix": {"mu": 0.3},
    "clip_cov": {"masks": [{"name": "clip_cov", "share": 0.1, "low": 0.0, "high": 3.0}]},
    "otb": {},
    "sft": {},
    "distill": {"divergence": "jsd"},
    "ppo": {"advantage": {"lam": 0.9}, "critic": {"lr": 1e-3}},
    "dpo": {"sft": 0.2},
    "experts": {"advantage": {"lam": 0.9}, "critic": {"lr": 1e-3}, "kl": 0.1},
    "reward_model": {"margin": 0.2, "centre_coefficient": 0.1},
}
DTYPES = {"fp32": torch.float32, "float64": torch.float64}
BOUNDS = {"fp32": 1e-5, "float64": 1e-10}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "experts_implementation": "eager"}
CONFIG: dict[str, Any] = {"updates_per_batch": 2, "micro_batch_tokens": 30, "eps": 1e-4}


def _runs(name: str, dtype: str, sharding: Sharding) -> bool:
    """Whether the models of a job are cut in this way, too."""
    cut = {"fsdp": {"fp32": ("grpo", "mix", "distill"), "float64": ("ppo", "sft")}}
    cut["tensor"] = {"fp32": ("grpo",), "float64": ("ppo",)}
    cut["context"] = {"fp32": ("grpo",), "float64": ("ppo", "clip_cov", "distill")}
    cut["expert"] = dict.fromkeys(DTYPES, ("experts",))
    if name == "experts":
        return sharding in ("none", "fsdp", "context", "expert")
    return sharding == "none" or name in cut[sharding][dtype]


SHARDINGS = get_args(Sharding)
CASES = [(n, d, sharding) for n in ALGORITHMS for d in DTYPES for sharding in SHARDINGS if _runs(n, d, sharding)]

Result = tuple[list[dict[str, float]], dict[str, Tensor]]


def _learn(job: dict[str, Any], ranks: RankGroup | None = None) -> Result:
    """Metrics of each step, and how far all of them moved each model's weights."""
    trainer = trainer_of(job["model"], job["options"], reference=job["reference"], ranks=ranks, **CONFIG)
    models = _models(trainer)
    before = {name: flat(model) for name, model in models.items()}
    metrics = [trainer.step(batch, 1) for batch in job["batches"]]
    return metrics, {name: flat(model) - before[name] for name, model in models.items()}


def _models(trainer: Trainer | RewardTrainer) -> dict[str, Any]:
    if isinstance(trainer, RewardTrainer):
        return {"score": trainer.model}
    return {"policy": trainer.model} | ({"critic": trainer._critic.model} if trainer._critic else {})


def _of_rank(rank: int, jobs: dict[Any, dict[str, Any]]) -> dict[Any, Any]:
    results: dict[Any, Any] = {}
    for sharding in SHARDINGS:
        ranks = RankGroup(rank, RANKS, sharding)
        # a job's models and batches change as it is learned from
        for key, job in pickle.loads(pickle.dumps(jobs)).items():
            if _runs(*key, sharding):
                results[*key, sharding] = _learn(job, ranks)
    results["not finite"] = _not_finite(jobs["grpo", "fp32"], rank)
    return results


def _not_finite(job: dict[str, Any], rank: int) -> str:
    """What is said where a loss is infinite on rank 1 only, and its gradient is not."""
    forward = PolicyUpdater.forward

    def wrong(self: PolicyUpdater, part: MiniBatch, micro: MicroBatch, *args: Any, **kwargs: Any) -> Any:
        loss, terms = forward(self, part, micro, *args, **kwargs)
        return loss, {name: (weight, value + (torch.inf if rank else 0)) for name, (weight, value) in terms.items()}

    PolicyUpdater.forward = wrong  # type: ignore[method-assign]
    with pytest.raises(TrainingError) as error:
        _learn(job, RankGroup(rank, RANKS))
    return str(error.value)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, toy: Any, make_batch: Any) -> tuple[Any, list[Any]]:
    """Of one process and of each of two, by algorithm and type."""
    jobs = {}
    for name, keys in ALGORITHMS.items():
        for dtype in DTYPES:
            options = options_of("ppo" if name == "experts" else name, **keys)
            kind, changes = ("qwen3_moe", MOE) if name == "experts" else ("qwen3", {})
            model, reference = (toy(kind, seed=seed, **changes).to(DTYPES[dtype]) for seed in (0, 5))
            steps = [batch_for(make_batch, options, seed) for seed in (0, 1)]
            if options.uses_pairs:  # one row: nothing is left for the second process
                steps.append([e for e in steps[1] if e.group == "g0"])
            for batch in steps:
                record(model, batch, 3e-4 if name == "gspo" else 0.2)
            jobs[name, dtype] = {"model": model, "reference": reference, "options": options, "batches": steps}
    pair = computed_by_ranks(_of_rank, jobs, tmp_path_factory.mktemp("ranks"))
    return {key: _learn(job) for key, job in jobs.items()}, pair


@pytest.mark.parametrize(("name", "dtype", "sharding"), CASES)
def test_two_processes_learn_what_one_learns(results: Any, name: str, dtype: str, sharding: str) -> None:
    alone, pair = results
    metrics, moved = alone[name, dtype]
    names = {"ppo": {"policy", "critic"}, "experts": {"policy", "critic"}, "reward_model": {"score"}}
    assert moved.keys() == names.get(name, {"policy"})
    for each in pair:
        for got, expected in zip(each[name, dtype, sharding][0], metrics, strict=True):
            assert got == pytest.approx(expected, rel=BOUNDS[dtype], abs=BOUNDS[dtype])
        for model, movement in moved.items():
            off = (each[name, dtype, sharding][1][model] - movement).norm() / movement.norm()
            assert off < BOUNDS[dtype]
    for model in moved:
        assert torch.equal(pair[0][name, dtype, sharding][1][model], pair[1][name, dtype, sharding][1][model])


def test_a_loss_that_is_not_finite_on_one_rank_ends_the_step_on_all(results: Any) -> None:
    said = {each["not finite"] for each in results[1]}
    assert len(said) == 1
    assert "loss term 'policy' is inf, in a micro-batch with tasks task-g" in said.pop()
