"""vLLM beside a trainer: on its GPU it asks for the memory that it needs, not for most; other GPUs it has alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.toys import toy_checkpoint

from rollmill.config.engines import VLLMEngineConfig
from rollmill.config.model import ModelConfig
from rollmill.config.rollout import RolloutConfig
from rollmill.engines.vllm.build import build_vllm
from rollmill.engines.vllm.process import VLLMLaunchConfig
from rollmill.errors import ConfigError
from rollmill.models.load import load_policy

pytestmark = pytest.mark.gpu


def launched(folder: Path, **options: Any) -> VLLMLaunchConfig:
    """How vLLM is started for a small model, with a program that answers like a Python that has vLLM."""
    folder.mkdir(exist_ok=True)
    python = folder / "python"
    found = json.dumps({"vllm": True, "xxhash": True, "torchvision": True, "version": [3, 12]})
    python.write_text(f"#!/bin/sh\necho '{found}'\n")
    python.chmod(0o755)
    model = ModelConfig(path=toy_checkpoint(folder / "model", "qwen3"))
    policy = load_policy(model, texts=(), seed=0, device=torch.device("cuda"))
    section = VLLMEngineConfig(python=python, **options)
    return build_vllm(section, policy, RolloutConfig(), "bf16")._launch


def arguments(folder: Path, **options: Any) -> dict[str, Any]:
    """vLLM's arguments."""
    found: dict[str, Any] = launched(folder, **options).settings["arguments"]
    return found


def test_the_share_covers_weights_cache_and_work(tmp_path: Path) -> None:
    total = torch.cuda.get_device_properties(0).total_memory
    small, large = (arguments(tmp_path / str(gb), cache_gb=gb)["gpu_memory_utilization"] for gb in (2.0, 42.0))
    assert 6 * 2**30 <= small * total <= 6 * 2**30 + 0.01 * total
    assert large - small == pytest.approx(40 * 2**30 / total, abs=0.011)


def test_options_decide(tmp_path: Path) -> None:
    assert arguments(tmp_path, options={"gpu_memory_utilization": 0.5})["gpu_memory_utilization"] == 0.5


@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize(("visible", "seen"), [(None, "1"), ("GPU-a,GPU-b", "GPU-b")])
def test_another_gpu_is_the_only_one_that_it_sees(
    visible: str | None, seen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    launch = launched(tmp_path, gpus=[1])
    assert list(launch.gpus) == [seen]
    assert launch.settings["arguments"]["tensor_parallel_size"] == 1


@pytest.mark.usefixtures("simulated")
def test_several_gpus_split_the_model_unless_options_say_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert arguments(tmp_path / "a", gpus=[2, 3])["tensor_parallel_size"] == 2
    found = arguments(tmp_path / "b", gpus=[2, 3], options={"data_parallel_size": 2})
    assert "tensor_parallel_size" not in found


def test_a_gpu_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no GPU 99"):
        launched(tmp_path, gpus=[1, 99])
