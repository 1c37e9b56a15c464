"""AdamW with moments in 8 bits: the code's exact means, the learning of fp32, resume, sizes, and what is refused."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.tiny import outcome, ran, tiny_run
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from rollmill.config.loader import load_run
from rollmill.config.trainer import TrainerConfig
from rollmill.errors import ConfigError
from rollmill.launch import resume
from rollmill.offload.plan import estimate_component_sizes
from rollmill.trainer.optimizer import (
    build_optimizer,
    load_optimizer_state_dict,
    optimizer_state_dict,
    optimizer_tensors,
)
from rollmill.trainer.quantized_moments import FIRST, SECOND, MomentCode, empty_codes

EVERY = torch.arange(-(1 << 15), 1 << 15).to(torch.int16)
"""All 65,536 values of the random bits."""


@pytest.mark.parametrize(("kind", "value"), [(FIRST, 0.37), (FIRST, -3e-4), (SECOND, 0.37), (SECOND, 3e-8)])
def test_the_mean_over_all_random_bits_is_the_value(kind: MomentCode, value: float) -> None:
    """Every block is one value beside a largest one of 1."""
    blocks = torch.zeros(len(EVERY), 256)
    blocks[:, 0], blocks[:, 1] = 1.0, value
    codes, scales = empty_codes(blocks, kind)
    kind.encode(blocks.view(-1), EVERY[:, None].expand(-1, 256).reshape(-1), codes, scales)
    found = kind.decode(codes, scales)
    assert len(found[:, 1].unique()) == 2
    assert float(found[:, 1].double().mean()) == pytest.approx(value, rel=2e-5)
    assert (found[:, 0] == 1).all()


@pytest.mark.parametrize("kind", [FIRST, SECOND])
def test_values_keep_their_precision_over_orders_of_magnitude(kind: MomentCode) -> None:
    """Between neighbouring codes are 4 roots of the value: 1.6 % at the largest, 16 % at a 100th of its root."""
    roots = torch.linspace(0.01, 1, 300)  # the last block is not full
    values = roots**kind.power * 7
    codes, scales = empty_codes(values, kind)
    kind.encode(values.clone(), torch.zeros(300, dtype=torch.int16), codes, scales)
    found = kind.decode(codes, scales).view(-1)[:300]
    assert ((found - values).abs() / values)[roots > 0.1].max() < 0.17 * (2 if kind.signed else 1)
    assert (found > 0).all() or kind.signed


def test_a_second_moment_is_never_zero() -> None:
    codes, scales = empty_codes(torch.zeros(256), SECOND)
    values = torch.zeros(256)
    values[0] = 1.0
    SECOND.encode(values, torch.zeros(256, dtype=torch.int16), codes, scales)
    assert float(SECOND.decode(codes, scales).min()) > 0


def learned(optimizer: str, dtype: torch.dtype, seed: int) -> float:
    """Mean loss of the last 40 of 160 steps of a small classifier on noisy labels."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(32, 96), nn.GELU(), nn.Linear(96, 10)).to(dtype)
    teacher = torch.randn(32, 10)
    config = TrainerConfig(lr=3e-3, optimizer=optimizer)  # type: ignore[arg-type]
    made = build_optimizer(model, config)
    losses = []
    for _ in range(160):
        x = torch.randn(64, 32)
        loss = cross_entropy(model(x.to(dtype)).float(), (x @ teacher + torch.randn(64, 10)).argmax(1))
        made.zero_grad()
        loss.backward()
        made.step()
        losses.append(loss.item())
    return sum(losses[-40:]) / 40


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(n, marks=[pytest.mark.slow, pytest.mark.thorough]) for n in (1, 2))]
)
def test_it_learns_as_fp32_does(seed: int) -> None:
    """The same data and first weights; seeds differ by 0.1, these runs by less than 0.01."""
    exact = learned("adamw", torch.float32, seed)
    assert learned("adamw_8bit", torch.float32, seed) == pytest.approx(exact, abs=0.03)
    assert learned("adamw_8bit", torch.bfloat16, seed) == pytest.approx(exact, abs=0.03)


def model_of(dtype: torch.dtype) -> nn.ParameterList:
    torch.manual_seed(0)
    return nn.ParameterList([nn.Parameter(torch.randn(shape).to(dtype)) for shape in ((9, 70), (70,), (300, 8))])


def step(model: nn.ParameterList, optimizer: torch.optim.Optimizer, count: int) -> list[Tensor]:
    for _ in range(count):
        for parameter in model:
            parameter.grad = parameter.detach().sin()
        optimizer.step()
    return [parameter.detach() for parameter in model]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_restored_optimizer_takes_the_same_steps(dtype: torch.dtype) -> None:
    config = TrainerConfig(lr=1e-2, optimizer="adamw_8bit")
    first, second = model_of(dtype), model_of(dtype)
    optimizer = build_optimizer(first, config)
    step(first, optimizer, 3)
    state = copy.deepcopy(optimizer_state_dict(optimizer, first))
    second.load_state_dict(first.state_dict())
    other = build_optimizer(second, config)
    load_optimizer_state_dict(other, second, state)
    assert {each.dtype for each in optimizer_tensors(other)} == {torch.int8, torch.uint8, torch.float32}
    assert all(map(torch.equal, step(first, optimizer, 3), step(second, other, 3)))
    narrow = model_of(torch.bfloat16)
    usual = build_optimizer(narrow, TrainerConfig())
    with pytest.raises(ValueError, match=r"are in 8 bits"):
        load_optimizer_state_dict(usual, narrow, state)


EIGHT: dict[str, Any] = {
    "stages": None,
    "algorithm": {"name": "grpo"},
    "steps": 4,
    "evaluation": None,
    "checkpoint": {"every": 2, "keep_last": 2},
    "trainer": {"lr": 3e-3, "optimizer": "adamw_8bit", "param_dtype": "bf16", "precision": "auto"},
}


def test_a_resumed_run_is_as_an_uninterrupted_one(tmp_path: Path) -> None:
    whole = ran(EIGHT, tmp_path, "whole")
    cut = tmp_path / "cut"
    shutil.copytree(whole, cut)
    shutil.rmtree(cut / "checkpoints/step-000004")
    resume(cut)
    assert outcome(cut) == outcome(whole)
    found, wanted = (load_file(run / "checkpoints/step-000004/model.safetensors") for run in (cut, whole))
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_its_size_is_known_before(tmp_path: Path) -> None:
    stage = load_run(tiny_run(tmp_path, **EIGHT)).stages[0]
    model = model_of(torch.bfloat16)
    optimizer = build_optimizer(model, stage.trainer)
    step(model, optimizer, 1)
    policy: Any = type("Policy", (), {"model": model, "device": torch.device("cpu")})
    taken = sum(each.nbytes for each in optimizer_tensors(optimizer))
    assert estimate_component_sizes(stage, policy, "bf16")["optimizer"] == taken


def test_shards_are_refused(tmp_path: Path) -> None:
    trainer = {"optimizer": "adamw_8bit", "ranks": 2, "sharding": "fsdp", "param_dtype": "fp32"}
    with pytest.raises(ConfigError, match=r"trainer.optimizer: adamw_8bit does not support shards"):
        load_run(tiny_run(tmp_path, **EIGHT | {"trainer": trainer}))
