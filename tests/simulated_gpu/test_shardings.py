"""On two CUDA devices every way of sharding computes one device's gradients."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.tiny import merged, metrics, tiny_run
from support.toys import toy_checkpoint
from torch import Tensor

import rollmill

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.thorough,
    pytest.mark.timeout(600),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

EPS = 1e4
"""AdamW with lr = eps and an eps above any gradient takes steps of the (clipped) gradient itself: so checkpoints hold
gradients, which Adam's usual steps would reduce to their signs."""
STEP: dict[str, Any] = {
    "stages": None,
    "steps": 1,
    "algorithm": {"name": "grpo", "kl": 0.01},
    "rewards": [{"name": "format", "pattern": "(?s).*[!-Oa-m]"}],  # of about half of all texts
    "trainer": {"lr": EPS, "eps": EPS, "micro_batch_tokens": 200},
    "evaluation": None,
    "checkpoint": {"every": 1},
}
PPO = {"name": "ppo", "critic": {"lr": 1e-3}, "kl": {"coefficient": 0.01, "where": "reward"}}
VARIANTS: dict[str, dict[str, Any]] = {
    "GRPO": {},
    "gradient checkpointing": {"trainer": {"gradient_checkpointing": True}},
    "PPO with a critic": {"algorithm": PPO},
    "LoRA": {"model": {"lora": {"rank": 4, "alpha": 8}}},
}
ARCHITECTURES = {"expert": "qwen3_moe"}  # else qwen3
ONLY_WHOLE = {"LoRA"}
"""Variants that are refused with weights or rows in parts."""
TOLERANCE = {
    # Sums in another order: a few units of the last place of fp32, times the condition of the sums.
    "fp32": 1e-4,
    # Activations are rounded to 8 bits (2^-9 of their size) at other places, where a product is cut; a dozen roundings
    # one after the other add up to about one per cent.
    "bf16": 0.03,
}
"""Norm of the difference of two gradients, by the norm of one."""


def gradient(folder: Path, name: str, architecture: str, trainer: dict[str, Any]) -> tuple[dict[str, Tensor], Any]:
    """The gradient of each weight in a run of one step, and the step's metrics."""
    model = toy_checkpoint(folder / "model", architecture)
    changes = merged(STEP, {"model": {"path": str(model), "new": None}, "trainer": trainer})
    rollmill.run(tiny_run(folder, **merged(changes, VARIANTS[name]) | {"stages": None}), out=folder / "out")
    [after] = (folder / "out/checkpoints").glob("step-*")
    adapters = VARIANTS[name].get("model") is not None
    trained = load_file(after / ("adapter/adapter_model.safetensors" if adapters else "model.safetensors"))
    before = load_file(model / "model.safetensors")
    [step] = [each for each in metrics(folder / "out") if "grad_norm" in each]
    return {name: each - before.get(name, torch.zeros(())) for name, each in trained.items()}, step


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The gradient that one rank computes; once for each of its arguments."""

    @functools.cache
    def computed(name: str, architecture: str, precision: str) -> Any:
        return gradient(tmp_path_factory.mktemp("alone"), name, architecture, {"precision": precision})

    return computed


CASES = [
    pytest.param(sharding, name, id=f"{sharding}, {name}")
    for sharding in ("none", "fsdp", "tensor", "context", "expert")
    for name in VARIANTS
    if sharding == "none" or name not in ONLY_WHOLE
]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("sharding", "name"), CASES)
def test_two_ranks_compute_the_gradient_of_one(
    sharding: str, name: str, precision: str, alone: Any, tmp_path: Path
) -> None:
    architecture = ARCHITECTURES.get(sharding, "qwen3")
    expected, step = alone(name, architecture, precision)
    trainer = {"precision": precision, "ranks": 2, "sharding": sharding}
    found, again = gradient(tmp_path, name, architecture, trainer)
    assert step["grad_norm"] > 0
    tolerance = TOLERANCE[precision]
    for key in ("grad_norm", "loss", "value/loss", "value/grad_norm", "entropy"):
        if key in step:
            assert again[key] == pytest.approx(step[key], rel=tolerance, abs=tolerance * step["grad_norm"]), key
    assert expected.keys() == found.keys()
    largest = max(float(each.norm()) for each in expected.values())
    for key, each in expected.items():
        off = float((found[key] - each).norm())
        assert off <= tolerance * max(float(each.norm()), 0.1 * largest), key
    assert sum(bool(each.any()) for each in found.values()) >= len(found) / 2
