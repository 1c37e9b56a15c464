"""vLLM beside a trainer on one GPU asks for the memory that it needs, not for most of the GPU."""

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
from rollmill.models.load import load_policy

pytestmark = pytest.mark.gpu


def arguments(folder: Path, **options: Any) -> dict[str, Any]:
    """vLLM's arguments for a small model, with a program that answers like a Python that has vLLM."""
    folder.mkdir(exist_ok=True)
    python = folder / "python"
    found = json.dumps({"vllm": True, "xxhash": True, "torchvision": True, "version": [3, 12]})
    python.write_text(f"#!/bin/sh\necho '{found}'\n")
    python.chmod(0o755)
    model = ModelConfig(path=toy_checkpoint(folder / "model", "qwen3"))
    policy = load_policy(model, texts=(), seed=0, device=torch.device("cuda"))
    section = VLLMEngineConfig(python=python, **options)
    engine = build_vllm(section, policy, RolloutConfig(), "bf16")
    made: dict[str, Any] = engine._launch.settings["arguments"]
    return made


def test_the_share_covers_weights_cache_and_work(tmp_path: Path) -> None:
    total = torch.cuda.get_device_properties(0).total_memory
    small, large = (arguments(tmp_path / str(gb), cache_gb=gb)["gpu_memory_utilization"] for gb in (2.0, 42.0))
    assert 6 * 2**30 <= small * total <= 6 * 2**30 + 0.01 * total
    assert large - small == pytest.approx(40 * 2**30 / total, abs=0.011)


def test_options_decide(tmp_path: Path) -> None:
    assert arguments(tmp_path, options={"gpu_memory_utilization": 0.5})["gpu_memory_utilization"] == 0.5
