"""`rollmill plan --cluster`: estimates from data sheets, and the orchestrator's code on virtual time against the fast
simulation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollmill.apps.plan.planning.cluster import plan_cluster, plan_stage_on
from rollmill.apps.plan.planning.cluster_costs import (
    gpu_kind,
    read_cluster_model,
    smallest_explorer,
    trainer_memory,
    training_s,
)
from rollmill.apps.plan.planning.simulation import simulate_stage
from rollmill.apps.plan.simulation.engine import SimulationCosts
from rollmill.apps.plan.simulation.steps import simulate_steps
from rollmill.cli import main
from rollmill.config.model import ModelConfig
from rollmill.config.run import StageConfig
from rollmill.errors import ConfigError
from rollmill.models.gpu_kinds import GPU_KINDS
from rollmill.orchestrator.pacing import Pacing

BATCH = 8
EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "minimal.yaml"
QWEN_7B = {
    "architecture": "qwen2",
    "hidden_size": 3584,
    "layers": 28,
    "heads": 28,
    "kv_heads": 4,
    "intermediate_size": 18944,
    "tie_embeddings": False,
    "tokenizer": {"vocab_size": 152064},
}


def stage(**keys: object) -> StageConfig:
    rollout = {"batch": BATCH, "group_size": 4, "max_new_tokens": 64}
    return StageConfig.model_validate({"taskset": {"path": "tasks.jsonl"}, "rollout": rollout, **keys})


@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize("explorers", [1, 4])
@pytest.mark.parametrize("train_s", [0.3, 3.0])
def test_the_real_code_takes_as_long_as_the_fast_simulation(staleness: int, explorers: int, train_s: float) -> None:
    costs = SimulationCosts([[50] * 4], [train_s], 1e-3, 1e-3, 1e-2, 0.1, 0.05, 0.02, 1e-4)
    fast = simulate_stage(costs, Pacing(BATCH, staleness, 10**6), explorers, steps=24)
    real = simulate_steps(stage(max_staleness=staleness), costs, explorers, steps=12, max_sequences=256)
    assert real.step_s() == pytest.approx(fast.step_s(), rel=0.1)
    assert max(real.staleness) <= staleness


def test_a_model_of_seven_billion_weights_on_the_kinds_of_gpus() -> None:
    rollout = {"batch": 128, "group_size": 8, "max_new_tokens": 8192}
    model = read_cluster_model(ModelConfig.model_validate({"new": QWEN_7B}), stage(rollout=rollout), 512, None)
    assert model.parameters == pytest.approx(7.6e9, rel=0.02)
    assert model.cache_bytes == 2 * 28 * 4 * 128 * 2
    explorer = smallest_explorer(model, gpu_kind("h100"), sequences=32)
    assert explorer.gpus == 1
    assert 2 * model.parameters < explorer.memory < GPU_KINDS["h100"].memory
    assert smallest_explorer(model, gpu_kind("a10"), sequences=32).gpus > 1
    assert trainer_memory(model, 8) < trainer_memory(model, 4)
    tokens = 128 * (512 + 8 * 4096)
    rate = 6 * model.parameters * tokens / training_s(model, gpu_kind("h100"), 16) / 16
    assert 0.3 < rate / GPU_KINDS["h100"].flops <= 0.4


@pytest.mark.slow
def test_more_gpus_are_never_slower_and_what_limits_them_is_named() -> None:
    rollout = {"batch": 64, "group_size": 4, "max_new_tokens": 512}
    config = stage(rollout=rollout, max_staleness=1)
    model = read_cluster_model(ModelConfig.model_validate({"new": QWEN_7B}), config, 128, 256)
    plans = [plan_stage_on(model, gpu_kind("h100"), count) for count in (8, 32)]
    assert [each.trainer_ranks + each.explorers * each.gpus_of_explorer for each in plans] == [8, 32]
    assert plans[1].steps_per_s > plans[0].steps_per_s
    for each in plans:
        assert each.bottleneck == max(each.bounds, key=lambda name: each.bounds[name])
        assert each.steps_per_s <= 1.05 / each.bounds["training"]


def test_a_model_that_fits_no_node_is_refused() -> None:
    model = read_cluster_model(
        ModelConfig.model_validate({"new": QWEN_7B | {"intermediate_size": 2**20}}), stage(), 64, None
    )
    with pytest.raises(ConfigError, match="no room for the weights"):
        smallest_explorer(model, gpu_kind("a10"), sequences=8)


def test_unknown_kinds_and_numbers_are_refused() -> None:
    with pytest.raises(ConfigError, match="unknown kind of GPU; choose one of a10,"):
        plan_cluster(EXAMPLE, kind="abacus")
    with pytest.raises(ConfigError, match="--gpus 1"):
        plan_cluster(EXAMPLE, kind="h100", counts=[1])
    with pytest.raises(ConfigError, match="no stage rolls out"):
        plan_cluster(EXAMPLE.with_name("sft.yaml"), kind="h100")
    assert main(["plan", str(EXAMPLE), "--cluster", "h100", "--gpus", "many"]) == 2


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", str(EXAMPLE), "--set", "rollout.batch=4", "--cluster", "h100", "--gpus", "8,64"]
    assert main(words) == 0
    assert "limited by" in capsys.readouterr().out
    assert main([*words, "--json"]) == 0
    done = json.loads(capsys.readouterr().out)
    assert [each["gpus"] for each in done["plans"]] == [8, 64]
