"""On a CUDA device, runs that must compute the same do: offloaded, resumed, and on several ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.tiny import merged, metrics, tiny_run

import rollmill

pytestmark = pytest.mark.gpu

BASE: dict[str, Any] = {
    "stages": None,
    "algorithm": {"name": "grpo", "kl": 0.01},
    "steps": 4,
    "trainer": {"precision": "bf16", "lr": 1e-3},
    "evaluation": None,
    "checkpoint": {"every": 1},
}
PPO = {"name": "ppo", "critic": {"lr": 1e-3, "warmup_steps": 1}, "kl": {"coefficient": 0.01, "where": "reward"}}


def ran(folder: Path, **changes: Any) -> Path:
    folder.mkdir()
    rollmill.run(tiny_run(folder, **merged(BASE, changes)), out=folder / "out")
    return folder / "out"


def weights(run: Path) -> dict[str, torch.Tensor]:
    """Those of the last checkpoint."""
    return load_file(max((run / "checkpoints").glob("step-*")) / "model.safetensors")


def require_equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name, each in a.items():
        assert bool(each.isfinite().all()), name
        assert torch.equal(each, b[name]), name


@pytest.fixture(scope="module")
def resident(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose components all stay on the device."""
    return ran(tmp_path_factory.mktemp("resident") / "run")


@pytest.mark.parametrize("tier", ["disk", "memory"])
def test_an_offloaded_run_computes_the_same(
    tier: str, resident: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    emptied: list[int] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(1))
    places = dict.fromkeys(("policy", "optimizer", "reference"), tier)
    offloaded = ran(tmp_path / "run", offload=places | {"cast": "destroyed", "cache": "destroyed"})
    require_equal(weights(resident), weights(offloaded))
    assert emptied  # so that other processes get the memory
    assert [each["grad_norm"] for each in metrics(resident)] == [each["grad_norm"] for each in metrics(offloaded)]


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="grpo"),
        pytest.param({"algorithm": PPO}, id="ppo"),
        pytest.param({"trainer": {"optimizer": "adamw_8bit", "param_dtype": "bf16"}}, id="bf16 weights, 8 bits"),
    ],
)
def test_a_resumed_run_ends_bit_equal(changes: dict[str, Any], tmp_path: Path) -> None:
    whole = ran(tmp_path / "whole", **changes)
    half = ran(tmp_path / "half", **changes, steps=2)
    rollmill.resume(half, steps=4)
    require_equal(weights(whole), weights(half))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_ranks_with_fsdp_compute_what_one_does(tmp_path: Path) -> None:
    one = ran(tmp_path / "one", trainer={"precision": "fp32"})
    two = ran(tmp_path / "two", trainer={"precision": "fp32", "ranks": 2, "sharding": "fsdp"})
    for a, b in zip(metrics(one), metrics(two), strict=True):
        assert a["grad_norm"] > 0
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-3)
    for name, each in weights(one).items():
        torch.testing.assert_close(each, weights(two)[name], atol=2e-4, rtol=2e-3)
