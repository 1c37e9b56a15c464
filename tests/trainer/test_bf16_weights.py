"""Weights and moments in bf16 with stochastic rounding: exact means, the path of fp32, resume, and what is refused."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.tiny import GRPO, metrics, outcome, ran, tiny_run
from torch import Tensor, nn

import rollmill
from rollmill.config.loader import load_run
from rollmill.config.trainer import TrainerConfig
from rollmill.errors import ConfigError
from rollmill.launch import resume
from rollmill.trainer.optimizer import build_optimizer, compute_gradient_norm
from rollmill.trainer.stochastic_adamw import StochasticAdamW, round_stochastically

EVERY = torch.arange(-(1 << 15), 1 << 15).to(torch.int16)
"""All 65,536 values of the random bits."""
BF16: dict[str, Any] = {
    "stages": None,
    "algorithm": {"name": "grpo"},
    "steps": 4,
    "evaluation": None,
    "checkpoint": {"every": 2, "keep_last": 2},
    "trainer": {"lr": 3e-3, "param_dtype": "bf16", "precision": "auto"},
}


@pytest.mark.parametrize("value", [1.0001, -0.3, 3.14159e-20, 12345.678, -7e30, 1e-40])
def test_the_mean_over_all_random_bits_is_the_value(value: float) -> None:
    wanted = torch.tensor(value, dtype=torch.float32)
    found = round_stochastically(wanted.expand(len(EVERY)), EVERY)
    assert len(found.unique()) == 2
    assert float(found.double().mean()) == float(wanted.double())


@pytest.mark.parametrize("value", [0.0, 1.0, -1.5, 2.0**-100, 3.0e38])
def test_a_value_of_bf16_stays(value: float) -> None:
    wanted = torch.tensor(value).bfloat16()
    assert (round_stochastically(wanted.float().expand(len(EVERY)), EVERY) == wanted).all()


def steps(parameter: nn.Parameter, optimizer: torch.optim.Optimizer, count: int) -> Tensor:
    """Minimise sum (x - 1)^2 / 2 and return the weights."""
    for _ in range(count):
        parameter.grad = (parameter.detach() - 1).to(parameter.dtype)
        optimizer.step()
    return parameter.detach().double()


def adamw(parameter: nn.Parameter, lr: float) -> torch.optim.Optimizer:
    return build_optimizer(nn.ParameterList([parameter]), TrainerConfig(lr=lr))


def test_the_mean_of_many_weights_goes_the_way_of_fp32() -> None:
    """Each step is a sixtieth of the distance between neighbours in bf16: rounding to nearest would never move."""
    exact = nn.Parameter(torch.full((64, 256), 4.0))
    narrow = nn.Parameter(exact.detach().bfloat16())
    optimizer = adamw(narrow, 5e-4)
    assert isinstance(optimizer, StochasticAdamW)
    wanted, found = steps(exact, adamw(exact, 5e-4), 200), steps(narrow, optimizer, 200)
    moved = float(4 - wanted.mean())
    assert moved == pytest.approx(0.1, rel=1e-2)
    assert float(4 - found.mean()) == pytest.approx(moved, rel=2e-2)
    assert optimizer.state[narrow]["exp_avg_sq"].dtype == torch.bfloat16


def test_all_parts_of_a_large_tensor_are_updated_like_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the parts end changes the random bits only."""
    whole = nn.Parameter(torch.full((1000,), 4.0, dtype=torch.bfloat16))
    steps(whole, adamw(whole, 0.5), 3)
    monkeypatch.setattr("rollmill.trainer.stochastic_adamw._CHUNK", 64)
    parts = nn.Parameter(torch.full((1000,), 4.0, dtype=torch.bfloat16))
    steps(parts, adamw(parts, 0.5), 3)
    torch.testing.assert_close(parts, whole, rtol=2**-6, atol=0)


def test_a_restored_optimizer_takes_the_same_steps() -> None:
    first = nn.Parameter(torch.linspace(-2, 2, 96).view(8, 12).bfloat16())
    optimizer = adamw(first, 1e-3)
    steps(first, optimizer, 3)
    second = nn.Parameter(first.detach().clone())
    other = adamw(second, 1e-3)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # which are the tensors themselves
    assert torch.equal(steps(first, optimizer, 3), steps(second, other, 3))


def test_the_gradient_norm_is_summed_in_fp32() -> None:
    grads = [torch.full((301,), 1.0078125, dtype=torch.bfloat16), torch.full((7,), 0.5, dtype=torch.bfloat16)]
    exact = sum(float(each.double().square().sum()) for each in grads) ** 0.5
    assert compute_gradient_norm(grads) == pytest.approx(exact, rel=1e-6)


def weights(run: Path, step: int) -> dict[str, Tensor]:
    return load_file(run / f"checkpoints/step-{step:06d}/model.safetensors")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ran(BF16, tmp_path_factory.mktemp("bf16"), "whole")


def test_a_run_trains_and_stores_weights_in_bf16(whole: Path) -> None:
    before, after = weights(whole, 2), weights(whole, 4)
    assert {each.dtype for each in after.values()} == {torch.bfloat16}
    assert all(not torch.equal(before[name], after[name]) for name in after if "_proj" in name)
    assert json.loads((whole / "machine.json").read_text())["precision"] == "bf16"
    assert all(row["logprob_gap/mean"] < 0.02 for row in metrics(whole) if "loss" in row)


def test_a_resumed_run_rounds_in_the_same_way(whole: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut"
    shutil.copytree(whole, cut)
    shutil.rmtree(cut / "checkpoints/step-000004")
    resume(cut)
    assert outcome(cut) == outcome(whole)
    found, wanted = weights(cut, 4), weights(whole, 4)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trainer": {"precision": "fp32"}}, r"trainer.precision: weights in bf16 \(param_dtype\)"),
        ({"trainer": {"precision": "auto", "ranks": 2}}, r"trainer.param_dtype: bf16 is supported with several"),
        ({"algorithm": {"name": "ppo"}}, r"trainer.param_dtype: a critic is trained in fp32"),
    ],
)
def test_what_needs_fp32_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    changed = BF16 | {name: BF16.get(name, {}) | each for name, each in changes.items()}
    with pytest.raises(ConfigError, match=message):
        load_run(tiny_run(tmp_path, **changed))


def test_stages_with_different_types_are_refused(tmp_path: Path) -> None:
    stages = [GRPO | {"name": "a", "trainer": BF16["trainer"]}, GRPO | {"name": "b"}]
    path = tiny_run(tmp_path, stages=stages, trainer={"precision": "auto"})
    with pytest.raises(ConfigError, match=r"trainer.param_dtype must be the same in all stages"):
        rollmill.run(path, out=tmp_path / "out")


@pytest.mark.slow
def test_shards_train_like_one_rank_and_resume_bit_equal(whole: Path, tmp_path: Path) -> None:
    """Gradients are summed in fp32; the bits of the rounding are others on each rank."""
    shards = BF16["trainer"] | {"ranks": 2, "sharding": "fsdp"}
    run = ran(BF16, tmp_path, "shards", trainer=shards)
    first, alone = metrics(run)[0], metrics(whole)[0]
    assert first["grad_norm"] == pytest.approx(alone["grad_norm"], rel=0.02)
    assert first["reward/mean"] == alone["reward/mean"]
    found = weights(run, 4)
    assert {each.dtype for each in found.values()} == {torch.bfloat16}
    shutil.rmtree(run / "checkpoints/step-000004")
    resume(run)
    again = weights(run, 4)
    assert all(torch.equal(found[name], again[name]) for name in found)
