"""Experts dealt out over two ranks: results, states and resumed steps are those of one rank."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.algorithm_batches import LIMIT, batch_for, flat, options_of, record

from rollmill.config.trainer import TrainerConfig
from rollmill.errors import ConfigError
from rollmill.trainer import DistributedTrainer
from rollmill.trainer.distributed.expert_parallel import check_expert_parallel, find_experts
from rollmill.trainer.distributed.fsdp import local_shards
from rollmill.trainer.distributed.ranks import RankGroup
from rollmill.trainer.distributed.spec import TrainerSpec
from rollmill.types import Experience

CPU = torch.device("cpu")
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
OPTIONS = options_of("grpo", kl=0.1)


def spec_of(**config: Any) -> TrainerSpec:
    settings = {"lr": 1e-3, "eps": 1e-4, "micro_batch_tokens": 40, "updates_per_batch": 2, "router_replay": True}
    return TrainerSpec(OPTIONS, TrainerConfig(**settings | config), "fp32", 10, LIMIT, seed=3)


def routed(batch: list[Experience]) -> list[Experience]:
    """Half of the completions come with the experts that their rollout chose: some other than the model would."""
    rng = np.random.default_rng(0)
    found = []
    for i, each in enumerate(batch):
        chosen = [rng.permutation(4)[:2] for _ in range(2 * len(each.token_ids))]
        routing = np.stack(chosen).reshape(len(each.token_ids), 2, 2).astype(np.uint8)
        found.append(replace(each, routing=routing if i % 2 else None))
    return found


@pytest.mark.thorough  # equal results in fp32 and float64, with a critic and a reference: test_ranks.py
@pytest.mark.slow
def test_experts_are_dealt_out_and_gathered_again(toy: Any, make_batch: Any, tmp_path: Path) -> None:
    """With gradient checkpointing, replayed routers, a reference, and one rank that goes on from the state of two."""
    model = toy("qwen3_moe", **MOE)
    steps = [routed(batch_for(make_batch, OPTIONS, seed)) for seed in range(3)]
    for batch in steps:
        record(model, batch, 0.2)
    whole, size = copy.deepcopy(model), flat(model).numel()
    alone = spec_of().trainer(model, None, CPU, RankGroup())
    metrics = [alone.step(batch, 0) for batch in steps[:2]]
    after = flat(alone.model)
    pair = DistributedTrainer(
        spec_of(ranks=2, sharding="expert", gradient_checkpointing=True), whole, None, CPU, tmp_path
    )
    try:
        got = [pair.step(batch, 0) for batch in steps[:2]]
        assert got == [pytest.approx(each, rel=2e-5, abs=2e-5) for each in metrics]
        pair.gather_policy()
        assert (flat(whole) - after).norm() < 2e-5 * after.norm()
        experts = sum(each.numel() for module in find_experts(whole) for each in module.parameters())
        held = sum(part.numel() for part in local_shards(list(pair.own.model.parameters())))
        assert (held, experts) == (size - experts // 2, 2 * 4 * 3 * 24 * 32)
        state = pair.state_dict()
    finally:
        pair.close()
    resumed = spec_of().trainer(whole, None, CPU, RankGroup())
    resumed.load_state_dict(state)
    expected, late = alone.step(steps[2], 1), resumed.step(steps[2], 1)
    assert late == pytest.approx(expected, rel=2e-5, abs=2e-5)
    assert (flat(resumed.model) - flat(alone.model)).norm() < 2e-5 * after.norm()


@pytest.mark.parametrize(
    ("architecture", "changes", "ranks", "said"),
    [
        ("qwen3", {}, 2, "trainer.sharding: qwen3 has no layers of experts that can be dealt out"),
        ("qwen3_moe", MOE, 3, "trainer.ranks: 3 cannot share the 4 experts of qwen3_moe"),
    ],
)
def test_a_model_whose_experts_cannot_be_dealt_out_is_an_error(
    toy: Any, architecture: str, changes: dict[str, Any], ranks: int, said: str
) -> None:
    with pytest.raises(ConfigError, match=f"{said}.*use sharding: fsdp or none"):
        check_expert_parallel(toy(architecture, **changes), ranks)
